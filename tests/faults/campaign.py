"""The campaign: commands are killed, starved of disk, doubled and fed with damaged files, and must come out right.

    python tests/faults/campaign.py --size 1      a few trials of everything; part of `make test`
    python tests/faults/campaign.py --size full   every write point, hundreds of kills, 1,000 inputs; `make faults`

Each trial is a forked child of this process. The same command is then given again, as a user would, and what is on the
disk must be, byte for byte, what an undisturbed run leaves. `--journal` keeps every trial: the same command goes on
where it was stopped, and `--shard 0/2` with `--shard 1/2` share the trials. Folders are made below $TMPDIR; in memory
(/dev/shm) there is no disk to wait for, and a killed process cannot tell the difference.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from children import Ended, child, import_everything, picture, run, wait
from shim import Shim
from small_run import RECIPE
from trials import Trials, code_hash

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


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


class Campaign:
    """Trials in folders of their own, one after another."""

    def __init__(self, folder: Path, trials: Trials) -> None:
        self.folder, self.trials = folder, trials
        self.number = 0
        os.environ["CONVERGEFLOW_CACHE"] = str(folder / "cache")
        os.environ["CONVERGEFLOW_QUIET"] = "1"

    @functools.cached_property
    def model(self) -> Path:
        """A model of a few thousand weights without a tokenizer."""
        made = self.folder / "tiny"
        words = ["import", "langflow", GOLDEN / "langflow_tiny", "--out", made, "--tokenizer", "none"]
        ended = run(words, self.folder / "import")
        assert ended.code == 0, ended.said
        return made

    def fresh(self) -> Path:
        self.number += 1
        root = self.folder / f"trial{self.number}"
        root.mkdir()
        return root

    def undisturbed(self, scenario: Scenario) -> tuple[dict[str, str], int, float]:
        """What the command leaves, how many changes it makes, and how long it takes."""
        run(scenario.words(root := self.fresh()), root)  # whatever is prepared on the way is there now
        root = self.fresh()
        began = time.monotonic()
        ended = run(scenario.words(root), root, Shim(root))
        assert ended.code == 0, ended.said
        return picture(root), sum(ended.points.values()), time.monotonic() - began

    def recovered(self, scenario: Scenario, root: Path, expected: dict[str, str]) -> str | None:
        """Give the command again; a complaint if it fails or leaves something else."""
        ended = run(scenario.again(root), root)
        if ended.code != 0:
            return f"the command after it ended with {ended.code}: {ended.last}"
        found = picture(root)
        shutil.rmtree(root)
        differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        return f"differs in {', '.join(differing[:4])}" if differing else None

    def disturb(self, scenario: Scenario, points: int | None, kills: int, writers: int) -> None:
        """Everything that can happen to a command; of its write points all, or some."""
        expected, total, seconds = self.undisturbed(scenario)
        chosen = range(1, total + 1)
        dice = random.Random(f"{self.trials.seed} points of {scenario.name}")
        for at in chosen if points is None else sorted(dice.sample(chosen, min(points, total))):
            self.trials.once(
                f"{scenario.name}: kill at a write point (of {total})",
                at,
                lambda _, at=at: self.killed_at(scenario, at, expected),
            )
        for at in sorted(dice.sample(chosen, min(max(1, (points or total) // 8), total))):
            self.trials.once(f"{scenario.name}: full disk", at, lambda _, at=at: self.full_from(scenario, at, expected))
        for number in range(kills):
            self.trials.once(
                f"{scenario.name}: kill at a random moment",
                number,
                lambda dice: self.killed_some_time(scenario, dice, seconds, expected),
            )
        for number in range(writers):
            self.trials.once(
                f"{scenario.name}: two writers", number, lambda dice: self.two_writers(scenario, dice, expected)
            )

    def killed_at(self, scenario: Scenario, at: int, expected: dict[str, str]) -> str | None:
        """Killed at a change of a file."""
        root = self.fresh()
        ended = run(scenario.words(root), root, Shim(root, at, "kill"))
        if ended.code != -signal.SIGKILL:
            return f"was not killed but ended with {ended.code}"
        return self.recovered(scenario, root, expected)

    def full_from(self, scenario: Scenario, at: int, expected: dict[str, str]) -> str | None:
        """The disk is full from a change on."""
        root = self.fresh()
        ended = run(scenario.words(root), root, Shim(root, at, "full"))
        if ended.code not in (0, 1) or not ended.one_line:
            return f"ended with {ended.code}: {ended.last}"
        return self.recovered(scenario, root, expected)

    def killed_some_time(
        self, scenario: Scenario, dice: random.Random, seconds: float, expected: dict[str, str]
    ) -> str | None:
        """Killed at a moment drawn from the time that the command takes; now and then twice in a row."""
        root = self.fresh()
        log = root.with_suffix(".log")
        for words in (scenario.words, scenario.again)[: dice.choice((1, 1, 2))]:
            number = child(words(root), log)
            time.sleep(dice.uniform(0, seconds))
            os.kill(number, signal.SIGKILL)
            wait(number, log)
        return self.recovered(scenario, root, expected)

    def two_writers(self, scenario: Scenario, dice: random.Random, expected: dict[str, str]) -> str | None:
        """The same command twice at once: one of them is refused, or waits, and nothing is lost or doubled."""
        root = self.fresh()
        logs = [root.with_suffix(f".{number}.log") for number in range(2)]
        numbers = []
        for log in logs:
            numbers.append(child(scenario.words(root), log))
            time.sleep(dice.uniform(0, 0.3))
        ended = [wait(number, log) for number, log in zip(numbers, logs, strict=True)]
        if sorted(each.code for each in ended) not in ([0, 0], [0, 2]):
            return f"ended with {[each.code for each in ended]}: {[each.last for each in ended]}"
        found = picture(root)
        shutil.rmtree(root)
        return None if found == expected else "another result"

    # -- flipped bits --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def whole(self) -> tuple[Path, dict[str, str]]:
        """A finished run and a corpus, and what is in the run."""
        root = self.fresh()
        assert run(scenarios(self.model)[0].words(root), root).code == 0
        expected = picture(root)
        sizes = ("--blocks", 16, "--heldout-blocks", 4, "--length", 32)
        assert run(["prepare", "stories", *sizes, "--out", root / "corpus"], root).code == 0
        return root, expected

    def flipped(self, dice: random.Random) -> str | None:
        """A bit of a file that has a hash: it must be refused by name, or passed over for an older whole one."""
        whole, expected = self.whole
        root = self.fresh()
        shutil.copytree(whole, root, dirs_exist_ok=True)
        folder = dice.choice(("run/model", "run/checkpoints", "corpus", "run/journal.jsonl"))
        files = [root / folder] if (root / folder).is_file() else list((root / folder).rglob("*.*"))
        path = dice.choice(sorted(file for file in files if file.is_file() and file.name not in UNHASHED))
        content = bytearray(path.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(content)
        complaint = self._found(root, path, expected)
        shutil.rmtree(root, ignore_errors=True)
        return complaint

    def _found(self, root: Path, path: Path, expected: dict[str, str]) -> str | None:
        name = path.relative_to(root).as_posix()
        if name.startswith("run/model"):
            ended = run(["inspect", root / "run/model"], root)
        elif name.startswith("corpus"):
            words = ["train", *RECIPE, f"corpus.name={root / 'corpus'}", "corpus.blocks=null", "--out", root / "other"]
            ended = run(words, root)
        else:
            shutil.rmtree(root / "run/model")
            for newer in sorted((root / "run/checkpoints").iterdir(), reverse=True):
                if newer in path.parents or name == "run/journal.jsonl":
                    break
                shutil.rmtree(newer)  # or the changed one would not be used
            ended = run(["train", "--out", root / "run", "--resume"], root)
            if ended.code == 0:  # an older checkpoint took its place
                shutil.rmtree(root / "corpus")
                return None if picture(root) == expected else f"{name}: another result"
        if ended.code not in (1, 2) or not ended.one_line:
            return f"{name}: ended with {ended.code}: {ended.last}"
        return None

    # -- several processes ---------------------------------------------------------------------------------------------

    def both(self, words: Sequence[object], root: Path, lose: float | None = None) -> list[Ended]:
        """Two processes of one command; one of them may be lost after a while."""
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

    def lost_processes(self, parallel: str, count: int) -> None:
        """One of two training processes dies: the other says so and ends; both go on to the same bytes."""
        kind = f"train: one of two processes lost ({parallel})"
        longer = ("stages.1.steps=30", "checkpoint_every=5", f"parallel={parallel}")

        def words(root: Path) -> list[object]:
            return ["train", *RECIPE, *longer, "--out", root / "run"]

        @functools.cache
        def unbroken() -> tuple[dict[str, str], float]:
            root = self.fresh()
            began = time.monotonic()
            assert [each.code for each in self.both(words(root), root)] == [0, 0]
            return picture(root), time.monotonic() - began

        def lost(dice: random.Random) -> str | None:
            expected, seconds = unbroken()
            root = self.fresh()
            ended = self.both(words(root), root, dice.uniform(0.3, 0.9) * seconds)
            # It may have been done by then.
            if ended[0].code != 0 and (ended[0].code != 1 or "another process" not in ended[0].last):
                return f"the other ended with {ended[0].code}: {ended[0].last}"
            again = ["train", "--out", root / "run", "--resume"]
            ended = self.both(again if (root / "run/run.json").exists() else words(root), root)
            if [each.code for each in ended] != [0, 0]:
                return f"going on ended with {[each.code for each in ended]}: {ended[0].last}"
            found = picture(root)
            shutil.rmtree(root)
            return None if found == expected else "another result"

        for number in range(count):
            self.trials.once(kind, number, lost)


UNHASHED = ("timing.jsonl", "settings.json", "tokenizer_config.json")
"""Clocks, and two small files of a corpus that no manifest lists; of the second only what is used is compared."""

SIZES: dict[str, dict[str, Any]] = {
    "1": {"points": 3, "kills": 1, "flips": 6, "writers": 1, "lost": 1, "served": 2, "fuzz": 0.04},
    "2": {"points": 20, "kills": 10, "flips": 60, "writers": 4, "lost": 3, "served": 10, "fuzz": 0.2},
    "full": {"points": None, "kills": 25, "flips": 300, "writers": 10, "lost": 5, "served": 50, "fuzz": 1.0},
}
LOCKED = ("train", "generate", "prepare")
"""Commands that two processes may give at once."""
PARTS = (*("train", "generate", "prepare", "evaluate", "compare", "serve"), "flips", "processes", "fuzz")


def shared(folder: Path, trials: Trials, size: str, parts: Sequence[str], jobs: int) -> None:
    """The campaign, its trials shared among forked workers, which import nothing again."""
    import_everything()
    if jobs == 1:
        return campaign(folder, trials, size, parts)
    workers = []
    for number in range(jobs):
        worker = os.fork()
        if worker == 0:
            code = 1
            try:
                trials.shard = (trials.shard[0] * jobs + number, trials.shard[1] * jobs)
                (folder / str(number)).mkdir()
                campaign(folder / str(number), trials, size, parts)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        workers.append(worker)
    ended = [os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers]
    if any(ended):
        raise SystemExit(f"a worker ended with {max(ended)}: the same command goes on")


def campaign(folder: Path, trials: Trials, size: str, parts: Sequence[str]) -> None:
    """The parts that are asked for, at a size; the dearest come last."""
    much = SIZES[size]
    made = Campaign(folder, trials)
    if "serve" in parts:
        from serve_trials import serve_trials

        serve_trials(made, much["served"])
    if "flips" in parts:
        for number in range(much["flips"]):
            trials.once("flipped bit", number, made.flipped)
    if "processes" in parts:
        for parallel in ("ddp", "fsdp"):
            made.lost_processes(parallel, much["lost"])
    if "fuzz" in parts:
        from fuzz import fuzz

        fuzz(made, much["fuzz"])
    for scenario in chosen(scenarios(made.model), parts):
        made.disturb(scenario, much["points"], much["kills"], much["writers"] if scenario.name in LOCKED else 0)


def chosen(all_of: list[Scenario], names: Sequence[str]) -> Iterator[Scenario]:
    return (each for each in all_of if each.name in names)


def command_line() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=list(SIZES), default="1")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--journal", help="keep trials here; {code} stands for the state of the code")
    parser.add_argument("--shard", default="0/1", help="take every Nth trial from the Kth on: K/N")
    parser.add_argument("--jobs", type=int, default=1, help="trials at once; they need a journal to be counted")
    asked = parser.parse_args()
    code = code_hash()
    shard, shards = map(int, asked.shard.split("/"))
    journal = None if asked.journal is None else Path(asked.journal.replace("{code}", code))
    if asked.jobs > 1 and journal is None:
        parser.error("--jobs needs a --journal")
    trials = Trials(asked.seed, asked.size, journal, (shard, shards), code)
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        shared(Path(folder), trials, asked.size, asked.only, asked.jobs)
    gc.unfreeze()
    if journal is not None:
        trials.read()  # with what other shards have done
    print(trials.table())
    print(f"\nseed {asked.seed}, size {asked.size}, code {code}, {time.strftime('%Y-%m-%d', time.gmtime())}")
    return 1 if trials.wrong else 0


if __name__ == "__main__":
    sys.exit(command_line())
