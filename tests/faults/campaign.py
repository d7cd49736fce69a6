"""The campaign: commands are killed, starved of disk, doubled and fed with flipped bytes, and must come out right.

    python tests/faults/campaign.py --seed 0 --size 1      a few trials of everything; part of `make test`
    python tests/faults/campaign.py --seed 0 --size full   every write point and hundreds of kills; `make faults`

Each trial is a forked child of this process, which has imported everything and computed nothing. The same command is
then given again, as a user would, and what is on the disk must be, byte for byte, what an undisturbed run leaves.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import io
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

for threads in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(threads, "1")
os.environ.update(OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).parent))

from shim import Shim  # noqa: E402
from small_run import RECIPE  # noqa: E402

from convergeflow.cli.main import main  # noqa: E402
from convergeflow.files import DRAFT, LOCK  # noqa: E402

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
CLOCKS = {"created", "seconds", "tokens_per_second", "training_seconds", "command", "versions", "points_seconds"}
"""What may differ between two runs of one command: the time of day, and how long things took."""
SECONDS = 120.0
"""Longer than this is a hang."""


def import_everything() -> None:
    """Whatever a child would import; it computes nothing but the law of the stories."""
    for name in (
        *("cli.generate", "cli.train", "cli.prepare", "cli.evaluate", "cli.compare", "cli.inspect", "cli.import_"),
        *("training.run", "data.prepare", "results.draw", "results.record", "results.figures", "results.trace"),
        *("studies.study", "studies.table", "studies.systems", "evaluation.assess", "evaluation.reference"),
        *("interop.langflow", "systems.convergeflow", "systems.autoregressive", "systems.langflow", "zoo"),
    ):
        importlib.import_module(f"convergeflow.{name}")
    from convergeflow.data.stories import stories_law
    from convergeflow.data.tokenizer import stories_tokenizer

    stories_law()
    stories_tokenizer()
    __import__("torch._dynamo")  # the optimizer asks for it


# --- children ---


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    code: int
    """Exit code; negative for a signal."""
    said: str
    points: dict[str, int] = field(default_factory=dict)


def child(
    words: Sequence[object], log: Path, shim: Shim | None = None, environment: dict[str, str] | None = None
) -> int:
    """Start a command in a forked child; its process id."""
    number = os.fork()
    if number:
        return number
    code = 70
    try:
        os.setpgid(0, 0)
        os.environ.update(environment or {})
        said = io.StringIO()
        if shim is not None:
            shim.install()
        with redirect_stdout(said), redirect_stderr(said):
            code = main([str(word) for word in words])
        counted = json.dumps({} if shim is None else shim.kinds)
        log.write_text(f"{counted}\n{said.getvalue()}")
    finally:
        os._exit(code)


def wait(number: int, log: Path, seconds: float = SECONDS) -> Ended:
    """Wait for a child, and end it when it takes too long."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(number, os.WNOHANG)
        if found:
            break
        if time.monotonic() > deadline:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
            return Ended(-99, f"no end within {seconds:.0f} s")
        time.sleep(0.005)
    code = os.waitstatus_to_exitcode(status)
    counted, _, said = log.read_text().partition("\n") if log.is_file() else ("{}", "", "")
    log.unlink(missing_ok=True)
    return Ended(code, said, json.loads(counted))


def run(words: Sequence[object], root: Path, shim: Shim | None = None, **environment: str) -> Ended:
    log = root.with_suffix(".log")
    return wait(child(words, log, shim, environment), log)


# --- what is on the disk ---


def picture(root: Path) -> dict[str, str]:
    """Every file that counts, by the hash of what must not differ."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_dir() or path.name == "timing.jsonl" or path.name.endswith(LOCK):
            continue
        if any(part.startswith(DRAFT) for part in path.relative_to(root).parts):
            continue
        # Records name the folder of their model.
        content = _content(path).replace(str(root).encode(), b"ROOT")
        found[name] = hashlib.sha256(content).hexdigest()
    return found


def _content(path: Path) -> bytes:
    if path.suffix in (".png", ".svg", ".html", ".md", ".csv"):
        return b"drawn"
    content = path.read_bytes()
    if path.suffix == ".json" and path.name not in ("manifest.json", "run.json", "config.json"):
        return json.dumps(_timeless(json.loads(content)), sort_keys=True).encode()
    return content


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(inner) for key, inner in value.items() if key not in CLOCKS}
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value


# --- commands under test ---


@dataclass(frozen=True)
class Scenario:
    """A command, and the command that a user gives after it was stopped."""

    name: str
    words: Callable[[Path], list[object]]
    again: Callable[[Path], list[object]]


def scenarios(model: Path) -> list[Scenario]:
    def train(root: Path) -> list[object]:
        return ["train", *RECIPE, "--out", root / "run"]

    def resume(root: Path) -> list[object]:
        started = (root / "run/run.json").exists()
        return ["train", "--out", root / "run", "--resume"] if started else train(root)

    def same(words: Callable[[Path], list[object]], name: str) -> Scenario:
        return Scenario(name, words, words)

    small = ("--num", 6, "--batch", 2, "--nfe", 4)
    budget = ("stages.0.steps=1", "stages.1.steps=1", *RECIPE[3:], "corpus.heldout_blocks=8")
    return [
        Scenario("train", train, resume),
        same(lambda root: ["generate", "--model", model, *small, "--out", root / "s.jsonl"], "generate"),
        same(
            lambda root: ["prepare", "stories", "--blocks", 20, "--heldout-blocks", 4, "--out", root / "corpus"],
            "prepare",
        ),
        same(
            lambda root: ["evaluate", "stories-small", *small, "--keep", root / "s.jsonl", "--out", root / "r.json"],
            "evaluate",
        ),
        same(
            lambda root: [
                *("compare", *budget, "--corpus", "test", "--systems", "ar", "--nfe", 3, "--num", 2, "--bound", 1),
                *("--out", root / "compare"),
            ],
            "compare",
        ),
    ]


# --- the campaign ---


@dataclass
class Tally:
    """What was tried, and what went wrong."""

    tried: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def note(self, kind: str, complaint: str | None) -> None:
        self.tried[kind] = self.tried.get(kind, 0) + 1
        if complaint:
            self.wrong.append(f"{kind}: {complaint}")
            print(f"WRONG {kind}: {complaint}", file=sys.stderr, flush=True)

    def table(self) -> str:
        rows = [f"| {kind} | {number} | {self._wrong(kind)} |" for kind, number in self.tried.items()]
        return "\n".join(["| what was tried | trials | not survived |", "|---|---|---|", *rows])

    def _wrong(self, kind: str) -> int:
        return sum(each.startswith(f"{kind}:") for each in self.wrong)


class Campaign:
    """Trials in folders of their own, one after another."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.dice, self.tally = folder, random.Random(seed), Tally()
        self.number = 0
        import_everything()
        os.environ["CONVERGEFLOW_CACHE"] = str(folder / "cache")
        os.environ["CONVERGEFLOW_QUIET"] = "1"
        self.model = folder / "tiny"
        source = str(GOLDEN / "langflow_tiny")
        made = run(["import", "langflow", source, "--out", self.model, "--tokenizer", "none"], folder / "import")
        assert made.code == 0, made.said

    def fresh(self) -> Path:
        self.number += 1
        root = self.folder / f"trial{self.number}"
        root.mkdir()
        return root

    def undisturbed(self, scenario: Scenario) -> tuple[dict[str, str], dict[str, int], float]:
        """What the command leaves, how many changes it makes, and how long it takes."""
        run(scenario.words(root := self.fresh()), root)  # whatever is prepared on the way is there now
        root = self.fresh()
        began = time.monotonic()
        ended = run(scenario.words(root), root, Shim(root))
        assert ended.code == 0, ended.said
        return picture(root), ended.points, time.monotonic() - began

    def recovered(self, scenario: Scenario, root: Path, expected: dict[str, str]) -> str | None:
        """Give the command again; a complaint if it fails or leaves something else."""
        ended = run(scenario.again(root), root)
        if ended.code != 0:
            return f"the command after it ended with {ended.code}: {ended.said.strip().splitlines()[-1:]}"
        found = picture(root)
        shutil.rmtree(root)
        differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        return f"differs in {', '.join(differing[:4])}" if differing else None

    def write_points(self, scenario: Scenario, most: int | None) -> None:
        """Kill at every change of a file (or some of them), and fill the disk at others."""
        expected, points, _ = self.undisturbed(scenario)
        total = sum(points.values())
        chosen = range(1, total + 1)
        for at in chosen if most is None else sorted(self.dice.sample(chosen, min(most, total))):
            root = self.fresh()
            ended = run(scenario.words(root), root, Shim(root, at, "kill"))
            odd = None if ended.code == -signal.SIGKILL else f"was not killed but ended with {ended.code}"
            complaint = odd or self.recovered(scenario, root, expected)
            self.tally.note(
                f"{scenario.name}: kill at a write point (of {total})", complaint and f"at {at}, {complaint}"
            )
        for at in self.dice.sample(chosen, min(max(1, (most or total) // 4), total)):
            root = self.fresh()
            ended = run(scenario.words(root), root, Shim(root, at, "full"))
            last = ended.said.strip().splitlines()[-1:] or [""]
            odd = None
            if ended.code not in (0, 1) or "internal error" in ended.said or "Traceback" in ended.said:
                odd = f"ended with {ended.code}: {last}"
            complaint = odd or self.recovered(scenario, root, expected)
            self.tally.note(f"{scenario.name}: full disk", complaint and f"at {at}, {complaint}")

    def random_kills(self, scenario: Scenario, count: int) -> None:
        """Kill at moments drawn from the time that the command takes; now and then twice in a row."""
        expected, _, seconds = self.undisturbed(scenario)
        for _ in range(count):
            root = self.fresh()
            log = root.with_suffix(".log")
            for words in (scenario.words, scenario.again)[: self.dice.choice((1, 1, 2))]:
                number = child(words(root), log)
                time.sleep(self.dice.uniform(0, seconds))
                os.kill(number, signal.SIGKILL)
                wait(number, log)
            self.tally.note(f"{scenario.name}: kill at a random moment", self.recovered(scenario, root, expected))

    def flips(self, count: int) -> None:
        """Flip a bit of a file that has a hash: it must be refused by name, or passed over for an older whole one."""
        train = scenarios(self.model)[0]
        whole = self.fresh()
        assert run(train.words(whole), whole).code == 0
        expected = picture(whole)
        corpus = [
            "prepare",
            "stories",
            "--blocks",
            16,
            "--heldout-blocks",
            4,
            "--length",
            32,
            "--out",
            whole / "corpus",
        ]
        assert run(corpus, whole).code == 0
        for _ in range(count):
            root = self.fresh()
            shutil.copytree(whole, root, dirs_exist_ok=True)
            folder = self.dice.choice(("run/model", "run/checkpoints", "corpus", "run/journal.jsonl"))
            files = [root / folder] if (root / folder).is_file() else list((root / folder).rglob("*.*"))
            hashed = [file for file in files if file.is_file() and file.name not in UNHASHED]
            path = self.dice.choice(sorted(hashed))
            content = bytearray(path.read_bytes())
            content[self.dice.randrange(len(content))] ^= 1 << self.dice.randrange(8)
            path.write_bytes(content)
            self.tally.note("flipped bit", self._flipped(root, path, expected))
            shutil.rmtree(root, ignore_errors=True)

    def _flipped(self, root: Path, path: Path, expected: dict[str, str]) -> str | None:
        name = path.relative_to(root).as_posix()
        if name.startswith("run/model"):
            ended = run(["inspect", root / "run/model"], root)
        elif name.startswith("corpus"):
            words = ["train", *RECIPE, f"corpus.name={root / 'corpus'}", "corpus.blocks=null", "--out", root / "other"]
            ended = run(words, root)
        else:
            shutil.rmtree(root / "run/model")
            ended = run(["train", "--out", root / "run", "--resume"], root)
            if ended.code == 0:  # an older checkpoint took its place
                shutil.rmtree(root / "corpus")
                return None if picture(root) == expected else f"{name}: another result"
        if ended.code not in (1, 2) or "internal error" in ended.said:
            return f"{name}: ended with {ended.code}: {ended.said[-200:]}"
        return None

    def two_writers(self, scenario: Scenario, count: int) -> None:
        """The same command twice at once: one of them is refused, or waits, and nothing is lost or doubled."""
        expected, _, _ = self.undisturbed(scenario)
        for _ in range(count):
            root = self.fresh()
            logs = [root.with_suffix(f".{number}.log") for number in range(2)]
            numbers = []
            for log in logs:
                numbers.append(child(scenario.words(root), log))
                time.sleep(self.dice.uniform(0, 0.3))
            ended = [wait(number, log) for number, log in zip(numbers, logs, strict=True)]
            codes = sorted(each.code for each in ended)
            odd = None if codes in ([0, 0], [0, 2]) else f"ended with {codes}: {[each.said[-150:] for each in ended]}"
            found = picture(root)
            complaint = odd or (None if found == expected else "another result")
            self.tally.note(f"{scenario.name}: two writers", complaint)
            shutil.rmtree(root)

    def lost_processes(self, count: int) -> None:
        """One of two training processes dies: the other says so and ends; both go on to the same bytes."""

        def both(words: Sequence[object], root: Path, lose: float | None = None) -> list[Ended]:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
            logs = [root.with_suffix(f".{rank}.log") for rank in range(2)]
            ranks = [
                child(words, log, None, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                for rank, log in enumerate(logs)
            ]
            if lose is not None:
                time.sleep(lose)
                os.kill(ranks[1], signal.SIGKILL)
            return [wait(number, log) for number, log in zip(ranks, logs, strict=True)]

        def words(root: Path) -> list[object]:
            return ["train", *RECIPE, "stages.1.steps=30", "checkpoint_every=5", "--out", root / "run"]

        root = self.fresh()
        began = time.monotonic()
        whole = both(words(root), root)
        seconds = time.monotonic() - began
        assert [each.code for each in whole] == [0, 0], whole
        expected = picture(root)
        for _ in range(count):
            root = self.fresh()
            ended = both(words(root), root, self.dice.uniform(0.3, 0.9) * seconds)
            complaint = None
            if ended[0].code != 0:  # it may have been done by then
                last = ended[0].said.strip().splitlines()[-1:] or [""]
                if ended[0].code != 1 or "another process" not in last[0]:
                    complaint = f"the other ended with {ended[0].code}: {last[0][:200]}"
            if complaint is None:
                again = ["train", "--out", root / "run", "--resume"]
                ended = both(again if (root / "run/run.json").exists() else words(root), root)
                if [each.code for each in ended] != [0, 0]:
                    complaint = f"going on ended with {[each.code for each in ended]}: {ended[0].said[-200:]}"
                elif picture(root) != expected:
                    complaint = "another result"
            self.tally.note("train: one of two processes lost", complaint)
            shutil.rmtree(root)


UNHASHED = ("timing.jsonl", "settings.json", "tokenizer_config.json")
"""Clocks, and two small files of a corpus that no manifest lists; of the second only what is used is compared."""

SIZES: dict[str, dict[str, Any]] = {
    "1": {"points": 3, "kills": 1, "flips": 6, "writers": 1, "lost": 1, "only": ("train", "generate", "prepare")},
    "2": {"points": 20, "kills": 10, "flips": 60, "writers": 4, "lost": 3, "only": None},
    "full": {"points": None, "kills": 60, "flips": 300, "writers": 10, "lost": 10, "only": None},
}


def campaign(folder: Path, seed: int, size: str) -> Tally:
    """Everything, at a size."""
    much = SIZES[size]
    trials = Campaign(folder, seed)
    for scenario in chosen(scenarios(trials.model), much["only"]):
        trials.write_points(scenario, much["points"])
        trials.random_kills(scenario, much["kills"])
        if scenario.name in ("train", "generate", "prepare"):
            trials.two_writers(scenario, much["writers"])
    trials.flips(much["flips"])
    trials.lost_processes(much["lost"])
    return trials.tally


def chosen(all_of: list[Scenario], names: Sequence[str] | None) -> Iterator[Scenario]:
    return (each for each in all_of if names is None or each.name in names)


def command_line() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=list(SIZES), default="1")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tally = campaign(Path(folder), asked.seed, asked.size)
    print(tally.table())
    print(f"\n{sum(tally.tried.values())} trials with seed {asked.seed}, {len(tally.wrong)} not survived")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(command_line())
