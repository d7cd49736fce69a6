"""The paper's path with stand-ins: runs the commands of docs/paper-scale.md, kills some, and checks what comes out.

    python tests/rehearsal.py [FOLDER]

Every fenced block of the page that is marked `bash rehearsal=NAME` is run by `bash`, with the words of `STAND_INS`
replaced: eight GPUs by two processes on the CPU, LangFlow's checkpoint by a tiny one of its format, OpenWebText by a
small parquet data set behind `hf:`, GPT-2 Large by a random GPT-2 of transformers, and 5,000 training steps by one. A
block that has no part here, or a part without a block, is an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "paper-scale.md"
BLOCK = re.compile(r"^```bash rehearsal=(\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TINY = ROOT / "tests" / "golden" / "langflow_tiny"
SHRINK = 5000
"""Steps of the paper for one step here: its checkpoint of 175,000 is that of 35."""


SIZES = """
like: paper
length: 24
num_samples: 12
part: 4
scorer: {scorer}
trace_sequences: 2
scratch_steps: 4
continued_steps: 16
checkpoints: 2
collapse_steps: 4
batch: 8
objective_nfe: 4
agreement_steps: [4]
shortcut_steps: [4, 6, 8]
"""


def blocks() -> dict[str, str]:
    return dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))


class Rehearsal:
    """A folder with the stand-ins, and what is done in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.began = folder, time.monotonic()
        self.commands, self.used = blocks(), set[str]()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    # ------------------------------------------------------------------------------------------------ the stand-ins

    def prepare_stand_ins(self) -> None:
        """Tokenizer, data set, scorer, recipe and sizes of the same shape as the real ones."""
        import pyarrow
        import pyarrow.parquet
        import transformers
        import yaml

        from convergeflow.data.tokenizer import train_words
        from convergeflow.training.recipes import read_recipe

        texts = [" ".join(f"w{(7 * text + place * place) % 197}" for place in range(90)) + "." for text in range(400)]
        tokenizer = train_words(iter([*texts, " ".join(f"x{number}" for number in range(30))]), 211)
        assert tokenizer.size == 211, tokenizer.size
        tokenizer.save(self.folder / "tokenizer")
        for number in range(2):
            file = self.folder / "openwebtext" / "plain_text" / "train" / f"{number:04d}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(pyarrow.table({"text": texts[200 * number : 200 * (number + 1)]}), file)
        transformers.set_seed(0)
        shape = transformers.GPT2Config(vocab_size=211, n_positions=128, n_embd=16, n_layer=1, n_head=2)
        transformers.GPT2LMHeadModel(shape).save_pretrained(self.folder / "gpt2-large-tiny")
        tokenizer.save(self.folder / "gpt2-large-tiny")
        recipe = read_recipe("owt")
        recipe["corpus"] |= {"tokenizer": "word", "vocabulary": 211, "length": 24}
        recipe["model"] = {"width": 64, "depth": 2, "heads": 4, "condition_width": 16, "dropout": 0.1, "size": None}
        for stage in recipe["stages"]:
            stage["steps"] //= SHRINK
        recipe |= {"batch": 40, "checkpoint_every": 1, "keep_every": recipe["keep_every"] // SHRINK, "log_every": 1}
        recipe |= {"evaluate_every": 20, "sample_every": 20, "sample_nfe": 4}
        (self.folder / "owt.yaml").write_text(yaml.safe_dump(recipe))
        (self.folder / "sizes.yaml").write_text(SIZES.format(scorer=self.folder / "gpt2-large-tiny"))

    def stand_ins(self) -> list[tuple[str, str]]:
        here = self.folder
        return [
            (r"PATH_OR_HUB_ID", str(TINY)),
            (r"hf:Skylion007/openwebtext", f"hf:{here / 'openwebtext'}"),
            (r"--tokenizer gpt2", f"--tokenizer {here / 'tokenizer'}"),
            (r"--scorer gpt2-large", f"--scorer {here / 'gpt2-large-tiny'}"),
            (r"--length 1024", "--length 24"),
            (r"-n 1024", "-n 12"),
            (r"\btrain owt\b", f"train {here / 'owt.yaml'}"),
            (r"--scale paper", f"--scale {here / 'sizes.yaml'}"),
            (r"--nnodes 2 (.*)--nproc-per-node 8", r"--nnodes 2 \1--nproc-per-node 1"),
            (r"--nproc-per-node 8", "--nproc-per-node 2"),
            (r"--master-port 29500", f"--master-port {self.port}"),
            (r"step-00175000", f"step-{175000 // SHRINK:08d}"),
        ]

    # ------------------------------------------------------------------------------------------------------- running

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def words(self, name: str, *changes: tuple[str, str]) -> str:
        """A block of the page as it is run here; `changes` are for a second run beside the page's."""
        self.used.add(name)
        text = self.commands[name]
        for pattern, instead in (*self.stand_ins(), *changes):
            text = re.sub(pattern, instead, text)
        return text.strip()

    def start(self, name: str, *changes: tuple[str, str], **environment: str) -> subprocess.Popen[str]:
        words = self.words(name, *changes)
        self.say(f"$ {words}" + "".join(f"  {key}={value}" for key, value in environment.items()))
        log = open(self.folder / "log.txt", "a")  # noqa: SIM115 (the process has its own copy)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": "", "PATH": path}
        own = {"CONVERGEFLOW_CACHE": str(self.folder / "cache"), "HF_HUB_OFFLINE": "1", **quiet}
        process = subprocess.Popen(
            ["bash", "-c", words],
            cwd=self.folder,
            env={**os.environ, **own, **environment},
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        log.close()
        return process

    def run(self, name: str, *changes: tuple[str, str], **environment: str) -> None:
        self.finish(name, self.start(name, *changes, **environment))

    def finish(self, name: str, *processes: subprocess.Popen[str]) -> None:
        codes = [process.wait(timeout=900) for process in processes]
        if any(codes):
            self.fail(f"{name}: exit codes {codes}")

    def fail(self, reason: str) -> None:
        tail = (self.folder / "log.txt").read_text()[-4000:] if (self.folder / "log.txt").exists() else ""
        sys.exit(f"{tail}\nrehearsal failed: {reason} (folder {self.folder})")

    def check(self, right: bool, what: str) -> None:
        if not right:
            self.fail(f"not so: {what}")
        self.say(f"  checked: {what}")

    def wait_for(self, ready: Callable[[], bool], *processes: subprocess.Popen[str], what: str) -> None:
        deadline = time.monotonic() + 600
        while not ready():
            if any(process.poll() is not None for process in processes) or time.monotonic() > deadline:
                self.fail(f"{what} did not come")
            time.sleep(0.02)

    def kill(self, process: subprocess.Popen[str], what: str) -> None:
        """SIGKILL to everything that a command started, as when a machine goes away."""
        for each in reversed([psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
        self.say(f"  killed: {what}")

    def kill_worker(self, process: subprocess.Popen[str], what: str) -> None:
        """SIGKILL to one process of a launch; the launcher must end the others."""
        workers = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "convergeflow" in child.cmdline() and "torchrun" not in " ".join(child.cmdline())
        ]
        workers[-1].kill()
        code = process.wait(timeout=300)
        self.say(f"  killed: {what}; the launch ended with {code}")
        if code == 0:
            self.fail("a launch that lost a process ended as if all were well")

    # --------------------------------------------------------------------------------------------------------- looking

    def steps(self, run: str) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.folder / run / "checkpoints").glob("step-*"))

    def weights(self, run: str) -> dict[str, bytes]:
        names = ("model.safetensors", "ema.safetensors", "optimizer.safetensors")
        newest = self.folder / run / "checkpoints" / f"step-{200000 // SHRINK:08d}"
        return {name: (newest / name).read_bytes() for name in names}

    def numbers(self, run: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / run / "journal.jsonl").read_text().splitlines()]


def rehearse(path: Rehearsal) -> None:
    path.prepare_stand_ins()
    path.run("import")
    path.run("prepare")
    path.run("cost")
    _train(path)
    _train_on_two_nodes(path)
    path.run("choose")
    _generate(path)
    path.run("evaluate")
    record = json.loads((path.folder / "record.json").read_text())
    path.check(record["gen_ppl"] > 1 and record["n"] == 12, f"the scorer gives a number: {record['gen_ppl']:.4g}")
    _reproduce(path)
    left = path.commands.keys() - path.used
    path.check(not left, "every marked block of the page was run" if not left else f"blocks left out: {sorted(left)}")


def _train(path: Rehearsal) -> None:
    """One machine: a process is killed, the run goes on, and ends as one that was never stopped."""
    launch = path.start("train")
    path.wait_for(lambda: max(path.steps("owt-run"), default=0) >= 7, launch, what="step 7")
    path.kill_worker(launch, f"one of two processes after step {max(path.steps('owt-run'))}")
    path.run("resume")
    path.run("train", (r"--out owt-run", "--out unbroken"))
    path.check(
        path.weights("owt-run") == path.weights("unbroken"), "killed and resumed: the weights of an unbroken run"
    )
    path.check(path.numbers("owt-run") == path.numbers("unbroken"), "and its journal")
    kept = path.steps("owt-run")
    path.check(kept == [5, 10, 15, 20, 25, 30, 35, 38, 39, 40], f"every 25,000th checkpoint and the last three: {kept}")


def _train_on_two_nodes(path: Rehearsal) -> None:
    """Two launchers with an address each; one machine goes away, both are started again."""
    other = (r"--out owt-run", "--out two-nodes")
    addresses = {"0": "127.0.0.1", "1": "127.0.0.2"}

    def both(name: str) -> list[subprocess.Popen[str]]:
        return [
            path.start(
                name,
                other,
                ("--nnodes 2", f"--nnodes 2 --local-addr {address}"),
                NODE=node,
                FIRST="127.0.0.1",
                GLOO_SOCKET_IFNAME="lo",
            )
            for node, address in addresses.items()
        ]

    first, second = both("two-nodes")
    path.wait_for(lambda: max(path.steps("two-nodes"), default=0) >= 4, first, second, what="step 4 on two nodes")
    path.kill(second, f"the second machine after step {max(path.steps('two-nodes'))}")
    try:
        code = first.wait(timeout=120)
        path.say(f"  the first machine noticed and ended with {code}")
    except subprocess.TimeoutExpired:
        path.fail("the first machine still waits for the second one")
    path.finish("two-nodes-resume", *both("two-nodes-resume"))
    same = path.weights("two-nodes") == path.weights("unbroken")
    path.check(same, "two nodes, one of them killed, resumed: the weights of an unbroken run on one node")


def _generate(path: Rehearsal) -> None:
    path.run("generate")
    alone = ((r"torchrun .*-m convergeflow", "convergeflow"), (r"samples\.jsonl", "alone.jsonl"))
    path.run("generate", *alone)
    two, one = ((path.folder / name).read_bytes() for name in ("samples.jsonl", "alone.jsonl"))
    path.check(two == one, "two processes write the samples that one writes")


def _reproduce(path: Rehearsal) -> None:
    """A point in parts, a killed launch and a second one that finishes; a training experiment by all processes."""
    out = path.folder / "reproduction"
    grids, objectives = (r"reproduce all", "reproduce grids"), (r"reproduce all", "reproduce objectives")
    launch = path.start("reproduce", grids)
    path.wait_for(lambda: len(list(out.glob("samples/[!.]*.json"))) >= 4, launch, what="four parts of points")
    path.kill(launch, f"the launch after {len(list(out.glob('samples/[!.]*.npz')))} parts")
    # A part is whole when the facts about it, which are written last, are there too.
    whole = [part for part in out.glob("samples/[!.]*.npz") if part.with_suffix(".json").is_file()]
    before = {part.name: part.stat().st_mtime_ns for part in whole}
    path.run("reproduce", grids)
    after = {part.name: part.stat().st_mtime_ns for part in out.glob("samples/[!.]*.npz")}
    path.check(all(after[name] == at for name, at in before.items()), "no part was made twice")
    records = [json.loads(file.read_text()) for file in out.glob("records/samples/[!.]*.json")]
    parts = sum(1 for _ in _parts(records))
    path.check(len(records) == 6 and len(after) == parts, f"no point was lost: {len(records)} points, {parts} parts")
    path.run("reproduce", objectives)
    states = [json.loads(file.read_text()) for file in out.glob("models/*/checkpoints/*/trainer.json")]
    path.check(bool(states) and {state["world"] for state in states} == {2}, "models are trained by both processes")
    path.check((out / "objectives.html").is_file() and (out / "grids.html").is_file(), "the reports are there")


def _parts(records: list[dict[str, Any]]) -> Iterator[None]:
    for record in records:
        yield from (None for _ in range(0, record["key"]["n"], 4))


def main() -> None:
    given = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
    folder = given or Path(tempfile.mkdtemp(prefix="rehearsal-"))
    folder.mkdir(parents=True, exist_ok=True)
    path = Rehearsal(folder)
    rehearse(path)
    path.say("the path holds")
    if given is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
