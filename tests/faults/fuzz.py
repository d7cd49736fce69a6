"""A fuzzer over commands and file formats, with hypothesis: whatever comes in, one line comes out.

    python tests/faults/campaign.py --only fuzz --size full --seed 0

A case is a command that ends quickly, with a few odd options, or with files in which something was changed. It runs in
a forked child with four gigabytes of memory and a minute of time. Wrong are tracebacks, internal errors, hangs,
signals, exit codes that mean nothing, memory that runs out, and changes outside the case's own folder and the cache.
Cases that were once wrong stay in `KEPT`.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from children import OUTSIDE, Ended, at_most, child, fence, wait
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from small_run import RECIPE
from stranger_files import CHECKPOINTS, damage, make, place

if TYPE_CHECKING:
    from campaign import Campaign

GIGABYTES, SECONDS = 4, 60.0

NUMBERS = ("-1", "0", "1", "2", "3", "1e3", "nan", "inf", "-0.5", "1e308", "1e-308", "9" * 12, "9" * 30, "", "x", "0x1")
WORDS = ("", " ", "x", "../x", "\x1b[31m", "$(id)", "a" * 5000, "é\u202e", "{}", "[1]", "null", "-", "--", ".")
OPTIONS = {
    "generate": {
        "numbers": "num length seed batch gap nfe scg refine ug temperature base-temperature block freeze-weight",
        "words": "preset schedule grid solver decode self-condition prompt infill set device trace logits out noise",
    },
    "evaluate": {"numbers": "num seed bound batch length nfe", "words": "scorer protocol corpus keep out samples set"},
    "sweep": {"numbers": "num length seed batch nfe", "words": "control values by scorer protocol corpus set"},
    "prepare": {
        "numbers": "vocabulary length blocks heldout-blocks heldout-share documents seed",
        "words": "tokenizer text-field dataset-split",
    },
    "parquet": {"numbers": "length heldout-share documents", "words": "text-field tokenizer"},
    "hub": {"numbers": "heldout-share documents", "words": "text-field dataset-split dataset-config"},
    "train": {"numbers": "", "words": "method device init-from"},
    "blind": {"numbers": "num seed", "words": "title"},
    "peers": {"numbers": "length", "words": "weights tokenizer revision"},
}
KEYS = (
    *("batch", "seed", "accumulate", "keep", "log_every", "stages.0.lr", "stages.0.steps", "optimizer.betas"),
    *("model.width", "model.heads", "model.schedule.kind", "model.dropout", "corpus.length", "corpus.name", "device"),
    *("stages", "model", "corpus", "nothing", "stages.9.lr", "model.size", "precision", "parallel", "optimizer.name"),
    "ema.decay",
)
FILES = {
    "generate": ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "noise.npy"),
    "inspect": ("config.json", "manifest.json", "record.json", "model.safetensors"),
    "evaluate": ("samples.jsonl",),
    "blind": ("samples.jsonl",),
    "prepare": ("text.txt", "text.jsonl"),
    "train": ("recipe.yaml",),
    "import": ("langflow/config.json", "langflow/model.safetensors"),
    "sweep": (),
    "parquet": ("text.parquet",),
    "hub": (
        "hub/plain_text/train/0000.parquet",
        "hub/plain_text/train/0001.parquet",
        "hub/plain_text/test/0000.parquet",
    ),
    "peers": (),
}
KINDS = ("cut", "flip", "insert", "empty", "value", "repeat", "nest", "header", "overwrite")
TABLES = (
    *("text.parquet", "text-none.parquet", "text-zstd.parquet", "dictionary.parquet", "large.parquet", "bytes.parquet"),
    *("broken.parquet", "numbers.parquet", "lists.parquet", "structs.parquet", "nothing.parquet", "gaps.parquet"),
    *("controls.parquet", "empty.parquet", "column.parquet"),
)
COUNTS = {
    "generate": 110,
    "evaluate": 60,
    "sweep": 50,
    "prepare": 90,
    "train": 110,
    "inspect": 70,
    "blind": 50,
    "import": 60,
    "parquet": 130,
    "hub": 90,
    "peers": 240,
}
"""Cases of each group in a full campaign."""


@dataclass(frozen=True)
class Case:
    """A command with odd options, and a change of a file that it reads."""

    group: str
    options: tuple[tuple[str, str], ...] = ()
    change: tuple[str, str, int] | None = None
    """File, kind of change, number."""
    source: str = ""
    """Which table or checkpoint."""


def options_of(group: str) -> st.SearchStrategy[tuple[tuple[str, str], ...]]:
    known = OPTIONS.get(group, {"numbers": "", "words": ""})
    pairs = []
    if known["numbers"]:
        pairs.append(st.tuples(st.sampled_from(known["numbers"].split()), st.sampled_from(NUMBERS)))
    if known["words"]:
        odd = st.sampled_from(WORDS) | st.text(max_size=12).filter(_tame)
        pairs.append(st.tuples(st.sampled_from(known["words"].split()), odd))
    if group == "train":
        pairs.append(st.tuples(st.sampled_from(KEYS), st.sampled_from(NUMBERS + WORDS)))
    return st.lists(st.one_of(pairs), max_size=3).map(tuple) if pairs else st.just(())


def _tame(text: str) -> bool:
    """No path that leads away from the case's folder: whoever asks for that gets it."""
    return "\x00" not in text and ".." not in text and not text.startswith(("/", "~"))


def cases(group: str) -> st.SearchStrategy[Case]:
    numbers = st.integers(0, 1 << 24)
    if group == "peers":

        def of(source: str) -> st.SearchStrategy[Case]:
            kinds = st.sampled_from((*KINDS, "inside", "inside", "archive", "value", "link"))
            change = st.tuples(st.sampled_from(CHECKPOINTS[source][2]), kinds, numbers)
            options = st.just(()) | options_of(group)
            return st.builds(Case, st.just(group), options, st.none() | change | change | change, st.just(source))

        return st.sampled_from(sorted(CHECKPOINTS)).flatmap(of)
    files, tables = FILES[group], group in ("parquet", "hub")
    more = {"parquet": ("same", "link"), "hub": ("same", "rename", "rename", "link", "folder")}.get(group, ())
    kinds = st.sampled_from((*KINDS, *more))
    change = st.tuples(st.sampled_from(files), kinds, numbers) if files else st.none()
    source = st.sampled_from((*TABLES, "text.parquet", "text.parquet")) if tables else st.just("")
    options = st.just(()) | options_of(group) if tables else options_of(group)
    return st.builds(Case, st.just(group), options, st.none() | change, source)


def drawn(group: str, count: int, number: int) -> list[Case]:
    """So many different cases of a group, always the same for a seed."""
    found: dict[Case, None] = {}

    @seed(number)
    @settings(
        max_examples=3 * count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(cases(group))
    def collect(case: Case) -> None:
        found[case] = None

    collect()
    return list(found)[:count]


KEPT: tuple[Case, ...] = (
    Case("prepare", (("vocabulary", "9" * 12),)),
    Case("generate", (("logits", "."),)),
    Case("sweep", (("values", "nan"),)),
    Case("train", (("model", "null"),)),
    Case("train", (("method", ""),)),
    Case("train", (("model.schedule.kind", "[1]"),)),
    Case("blind", (), ("samples.jsonl", "nest", 0)),
    Case("inspect", (), ("record.json", "value", 3)),
    Case("parquet", (), None, "broken.parquet"),
    Case("hub", (), ("hub/plain_text/train/0000.parquet", "value", 2400673), "text-zstd.parquet"),
    Case("peers", (), ("checkpoints-meta/checkpoint.pth", "flip", 9897), "sedd run"),
    Case("peers", (), ("", "insert", 109946), "duo file"),
    Case("peers", (), ("", "overwrite", 25108), "duo file"),
    Case("peers", (), ("", "header", 633), "elf file"),
)


class Fuzzer:
    """Runs cases in folders of their own."""

    def __init__(self, campaign: Campaign) -> None:
        self.campaign = campaign

    @functools.cached_property
    def made(self) -> Path:
        """Files that only libraries can write, made in a child: this process computes nothing."""
        folder = self.campaign.fresh()
        number = os.fork()
        if number == 0:
            code = 1
            try:
                make(folder)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(number, 0)[1] == 0, "the files could not be made"
        return folder

    def run(self, case: Case) -> Ended:
        root = self.campaign.fresh()
        (root / "here").mkdir()
        place(root, self.made, case.group, case.source)
        words = self.words(case, root)

        def first() -> None:
            os.chdir(root / "here")
            tempfile.tempdir = str(root)
            fence(root, self.campaign.folder / "cache")
            at_most(GIGABYTES)

        log = self.campaign.folder / f"{root.name}.log"
        ended = wait(child(words, log, first=first), log, SECONDS)
        shutil.rmtree(root, ignore_errors=True)
        return ended

    def check(self, case: Case) -> str | None:
        ended = self.run(case)
        if ended.code == OUTSIDE:
            return f"{case}: wanted to change a file outside: {ended.last}"
        broken = ended.code not in (0, 1, 2) or not ended.one_line or "too little memory" in ended.said
        if broken or (ended.code and not ended.last.startswith("error: ")):
            return f"{case}: {ended.code} {ended.said[-400:]}"
        return None

    def words(self, case: Case, root: Path) -> list[object]:
        changed = "" if case.change is None else case.change[0]
        if case.change is not None:
            for path in self.paths(case, root):
                damage(path, *case.change[1:])
        peer = CHECKPOINTS[case.source][0] if case.group == "peers" else ""
        words: dict[str, list[object]] = {
            "generate": ["generate", "--model", root / "model", "--num", 1, "--nfe", 2, "--length", 4],
            "evaluate": ["evaluate", *(["--samples", root / "samples.jsonl"] if changed else ["--num", 2, "--nfe", 2])],
            "sweep": ["sweep", root / "model", "--num", 2, "--nfe", 2, "--values", "1", "--out", root / "sweep"],
            "prepare": ["prepare", root / (changed or "text.txt"), "--length", 8, "--out", root / "corpus"],
            "parquet": [
                "prepare",
                root / "text.parquet",
                "--tokenizer",
                "byte",
                "--length",
                8,
                "--out",
                root / "corpus",
            ],
            "hub": ["prepare", f"hf:{root / 'hub'}", "--tokenizer", "byte", "--length", 8, "--out", root / "corpus"],
            "train": ["train", *((root / "recipe.yaml",) if changed else RECIPE), "--out", root / "run"],
            "inspect": ["inspect", root / ("record.json" if changed == "record.json" else "model")],
            "blind": ["blind", f"a={root / 'samples.jsonl'}", f"b={root / 'samples.jsonl'}", "--num", 1, "--out", root],
            "import": ["import", "langflow", root / "langflow", "--out", root / "out", "--tokenizer", "none"],
            "peers": ["import", peer, root / "peer", "--out", root / "out"],
        }
        chosen = words[case.group]
        if changed == "noise.npy":
            chosen += ["--noise", root / changed]
        for name, value in case.options:
            chosen += [f"{name}={value}"] if name in KEYS and case.group == "train" else [f"--{name}={value}"]
        return chosen

    def paths(self, case: Case, root: Path) -> list[Path]:
        """The file that is changed, if it is there."""
        assert case.change is not None
        name, _, number = case.change
        if case.group == "peers":
            found = sorted((root / "peer").glob(name)) if name else [root / "peer"]
            return found[number % len(found) :][:1] if found else []
        path = root / name if (root / name).exists() else root / "model" / name
        return [path] if path.is_file() else []


def fuzz(campaign: Campaign, share: float) -> None:
    """The cases that were once wrong, then a share of the full number of every group."""
    fuzzer, trials = Fuzzer(campaign), campaign.trials
    for number, case in enumerate(KEPT):
        trials.once("fuzzed input: once wrong", number, lambda _, case=case: fuzzer.check(case))
    for group, full in COUNTS.items():
        count = max(2, round(share * full))
        if all((f"fuzzed input: {group}", str(number)) in trials.done for number in range(count)):
            continue  # drawing takes its time too
        for number, case in enumerate(drawn(group, count, trials.seed)):
            trials.once(f"fuzzed input: {group}", number, lambda _, case=case: fuzzer.check(case))
