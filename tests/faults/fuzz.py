"""A fuzzer over commands and file formats, with hypothesis: whatever comes in, one line comes out.

    python tests/faults/fuzz.py --examples 1000 --seed 0

A case is a command that ends quickly, with a few odd options, or with files in which something was changed. It runs in
a forked child with four gigabytes of memory and a minute of time. Wrong are tracebacks, internal errors, hangs,
signals, exit codes that mean nothing, and changes outside the case's own folder. Cases that were once wrong stay in
`KEPT`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from campaign import GOLDEN, Campaign, Ended, child, picture, wait
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from small_run import RECIPE

SHIPPED = Path(__file__).resolve().parents[2] / "src/convergeflow/checkpoints/stories-small"
LINE = {"seed": 1, "ids": [1, 2, 3], "text": "a b c", "nfe": 4, "model": "m", "settings": {"nfe": 4}}
RECORD: dict[str, Any] = {"gen_ppl": 2.0, "gen_ppl_se": 0.1, "entropy": 1.0, "entropy_se": 0.1, "n": 2, "metrics": {}}

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
    "train": {"numbers": "", "words": "method device init-from"},
    "blind": {"numbers": "num seed", "words": "title"},
}
KEYS = (
    *(
        "batch",
        "seed",
        "accumulate",
        "keep",
        "log_every",
        "stages.0.lr",
        "stages.0.steps",
        "optimizer.betas",
        "ema.decay",
    ),
    *("model.width", "model.heads", "model.schedule.kind", "model.dropout", "corpus.length", "corpus.name", "device"),
    *("stages", "model", "corpus", "nothing", "stages.9.lr", "model.size", "precision", "parallel", "optimizer.name"),
)


@dataclass(frozen=True)
class Case:
    """A command with odd options, and a change of a file that it reads."""

    command: str
    options: tuple[tuple[str, str], ...] = ()
    change: tuple[str, str, int] | None = None
    """File, kind of change, place."""


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def options_of(command: str) -> st.SearchStrategy[tuple[tuple[str, str], ...]]:
    known = OPTIONS.get(command, {"numbers": "", "words": ""})
    pairs = []
    if known["numbers"]:
        pairs.append(st.tuples(st.sampled_from(known["numbers"].split()), st.sampled_from(NUMBERS)))
    if known["words"]:
        odd = st.sampled_from(WORDS) | st.text(max_size=12).filter(lambda text: "\x00" not in text)
        pairs.append(st.tuples(st.sampled_from(known["words"].split()), odd))
    if command == "train":
        pairs.append(st.tuples(st.sampled_from(KEYS), st.sampled_from(NUMBERS + WORDS)))
    return st.lists(st.one_of(pairs), max_size=3).map(tuple) if pairs else st.just(())


FILES = {
    "generate": ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "noise.npy"),
    "inspect": ("config.json", "manifest.json", "record.json", "model.safetensors"),
    "evaluate": ("samples.jsonl",),
    "blind": ("samples.jsonl",),
    "prepare": ("text.txt", "text.jsonl"),
    "train": ("recipe.yaml",),
    "import": ("langflow/config.json", "langflow/model.safetensors"),
    "sweep": (),
}


def cases() -> st.SearchStrategy[Case]:
    def of(command: str) -> st.SearchStrategy[Case]:
        files = FILES[command]
        kinds = st.sampled_from(("cut", "flip", "insert", "empty", "value", "repeat", "nest"))
        change = st.tuples(st.sampled_from(files), kinds, st.integers(0, 1 << 20)) if files else st.none()
        return st.builds(Case, st.just(command), options_of(command), st.none() | change)

    return st.sampled_from(sorted(FILES)).flatmap(of)


KEPT: tuple[Case, ...] = (
    Case("prepare", (("vocabulary", "9" * 12),)),
    Case("generate", (("logits", "."),)),
    Case("sweep", (("values", "nan"),)),
    Case("train", (("model", "null"),)),
    Case("train", (("method", ""),)),
    Case("train", (("model.schedule.kind", "[1]"),)),
    Case("blind", (), ("samples.jsonl", "nest", 0)),
    Case("inspect", (), ("record.json", "value", 3)),
)


class Fuzzer:
    """Runs cases in folders of their own."""

    def __init__(self, folder: Path) -> None:
        self.trials = Campaign(folder, 0)
        self.tried = 0
        self.precious = folder / "precious"
        self.precious.mkdir()
        (self.precious / "file").write_text("mine")

    def run(self, case: Case) -> Ended:
        root = self.trials.fresh()
        words = self._words(case, root)
        before = picture(self.precious)
        log = root.with_suffix(".log")
        number = os.fork()
        if number == 0:  # limits are for this child and its own alone
            os.chdir(root)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30),) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
            status = os.waitpid(child(words, log), 0)[1]
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        ended = wait(number, log, 300)
        assert picture(self.precious) == before, "something outside was changed"
        shutil.rmtree(root, ignore_errors=True)
        self.tried += 1
        return ended

    def check(self, case: Case) -> None:
        ended = self.run(case)
        where = f"{case}: {ended.code} {ended.said[-400:]}"
        assert ended.code in (0, 1, 2), where
        assert "Traceback" not in ended.said and "internal error" not in ended.said, where
        if ended.code:
            assert ended.said.strip().splitlines()[-1].startswith("error: "), where

    def _words(self, case: Case, root: Path) -> list[object]:
        shutil.copytree(SHIPPED, root / "model")
        shutil.copytree(GOLDEN / "langflow_tiny", root / "langflow")
        (root / "model/manifest.json").unlink()
        (root / "samples.jsonl").write_text("".join(json.dumps({**LINE, "seed": n}) + "\n" for n in range(3)))
        (root / "text.txt").write_text("Once there was a text.\n" * 60)
        (root / "text.jsonl").write_text('{"text": "Once there was a text."}\n' * 60)
        (root / "record.json").write_text(json.dumps(RECORD))
        (root / "recipe.yaml").write_text("corpus: {name: stories}\nmodel: {size: test}\nbatch: 4\nstages: []\n")
        shape = "{'descr': '<f8', 'fortran_order': False, 'shape': (1, 4, 8), }".ljust(117).encode() + b"\n"
        (root / "noise.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(shape).to_bytes(2, "little") + shape + bytes(256))
        changed = "" if case.change is None else case.change[0]
        if case.change is not None:
            path = root / changed if (root / changed).exists() else root / "model" / changed
            if path.is_file():
                path.write_bytes(damaged(path.read_bytes(), *case.change[1:]))
        words: dict[str, list[object]] = {
            "generate": ["generate", "--model", root / "model", "--num", 1, "--nfe", 2, "--length", 4],
            "evaluate": ["evaluate", *(["--samples", root / "samples.jsonl"] if changed else ["--num", 2, "--nfe", 2])],
            "sweep": ["sweep", root / "model", "--num", 2, "--nfe", 2, "--values", "1", "--out", root / "sweep"],
            "prepare": ["prepare", root / (changed or "text.txt"), "--length", 8, "--out", root / "corpus"],
            "train": ["train", *((root / "recipe.yaml",) if changed else RECIPE), "--out", root / "run"],
            "inspect": ["inspect", root / ("record.json" if changed == "record.json" else "model")],
            "blind": ["blind", f"a={root / 'samples.jsonl'}", f"b={root / 'samples.jsonl'}", "--num", 1, "--out", root],
            "import": ["import", "langflow", root / "langflow", "--out", root / "out", "--tokenizer", "none"],
        }
        chosen = words[case.command]
        if changed == "noise.npy":
            chosen += ["--noise", root / changed]
        for name, value in case.options:
            chosen += [f"{name}={value}"] if name in KEYS and case.command == "train" else [f"--{name}={value}"]
        return chosen


def damaged(content: bytes, kind: str, place: int) -> bytes:
    """A file with one thing wrong."""
    at = place % (len(content) + 1)
    if kind == "cut":
        return content[:at]
    if kind == "flip":
        return content[:at] + bytes([(content[at : at + 1] or b"\0")[0] ^ (1 << place % 8)]) + content[at + 1 :]
    if kind == "insert":
        return content[:at] + (b"\xff\x00\x1b", b"NaN", b"[[[", b"9" * 400)[place % 4] + content[at:]
    if kind == "empty":
        return b""
    if kind == "repeat":
        return content + content
    if kind == "nest":
        return b"[" * 20_000
    odd: tuple[Any, ...] = (None, True, -1, 0, 1e400, "x", [], {}, 10**30)
    try:
        values = json.loads(content)
        key = sorted(values)[place % len(values)]
        return json.dumps({**values, key: odd[place % len(odd)]}).encode()
    except (ValueError, TypeError):
        return json.dumps(odd[place % len(odd)]).encode()


def fuzz(examples: int, number: int) -> int:
    """Try so many cases, kept ones first; how many were tried. A wrong one is raised, made as small as can be."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        fuzzer = Fuzzer(Path(folder))
        for case in KEPT:
            fuzzer.check(case)

        @seed(number)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )
        @given(cases())
        def tried(case: Case) -> None:
            fuzzer.check(case)

        tried()
        return fuzzer.tried


def command_line() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(f"| fuzzed inputs | {fuzz(asked.examples, asked.seed)} | 0 |")
    return 0


if __name__ == "__main__":
    sys.exit(command_line())
