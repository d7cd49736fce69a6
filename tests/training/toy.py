"""A language model and a corpus of a few hundred numbers, and ways to run the trainer on them in other processes."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from convergeflow.objective.losses import Loss
from convergeflow.randomness import RowDraws
from convergeflow.systems.protocol import Samples
from convergeflow.training.config import RunConfig, from_dict
from convergeflow.training.trainer import Reporter, Trainer, TrainingEnd

VOCABULARY, LENGTH, WIDTH = 11, 6, 8


class ToyModel(nn.Module):
    """A table, two residual blocks, a head and a scalar schedule parameter with a fit of its own."""

    method = "toy"
    bound_kind = None

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.schedule = nn.Module()
        self.schedule.loc = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("scale", torch.ones(1))
        self.stage: Any = None
        self.poison = False

    def enter_stage(self, stage: Any) -> None:
        self.stage = stage
        self.embedding.weight.requires_grad_(stage.learn_table)
        self.schedule.loc.requires_grad_(stage.learn_schedule)

    def loss(self, tokens: Tensor, *, times: Tensor, draws: RowDraws) -> Loss:
        clean = self.embedding(tokens)
        noise = draws.normal(*clean.shape[1:])
        t = times.float()[:, None, None]
        h = t * clean + (1 - t) * noise
        # An extra pass on some rows only, as self-conditioning makes.
        active = (draws.uniform() < 0.25).nonzero()[:, 0]
        if len(active):
            with torch.no_grad():
                extra = self._trunk(h[active])
            h = h.index_add(0, active, extra)
        h = self._trunk(h)
        logits = self.head(h)
        ce = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        mse = (logits.softmax(-1) @ self.embedding.weight - clean).square().mean()
        total = ce if self.stage.objective == "ce" else mse
        # The last is a view of a weight, as a schedule's numbers are.
        parts = {"ce": float(ce.detach()), "mse": float(mse.detach()), "bias": self.head.bias[0].detach()}
        if self.stage.learn_schedule:
            total = total + (self.schedule.loc - ce.detach()).square()
        return Loss(total * float("nan") if self.poison else total, parts)

    def _trunk(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = h + self.dropout(block(h))
        return h

    def monitor(self, tokens: Tensor, *, draws: RowDraws) -> dict[str, float]:
        h = self._trunk(self.embedding(tokens) + draws.normal(LENGTH, WIDTH))
        return {"ce": float(nn.functional.cross_entropy(self.head(h).flatten(0, 1), tokens.flatten()))}

    def sample(self, num: int, length: int, *, seeds: Any, nfe: int, observe: Any = None, **controls: Any) -> Samples:
        ids = self.head(self._trunk(RowDraws(seeds).normal(length, WIDTH))).argmax(-1)
        return Samples(ids, list(seeds), 1, {})

    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor] | None = None) -> None:
        (Path(folder) / "config.json").write_text("{}")
        save_file(state_dict or self.state_dict(), Path(folder) / "model.safetensors")


class ToyTokenizer:
    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def save(self, folder: Path) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


class ToyCorpus:
    length, vocabulary, fingerprint = LENGTH, VOCABULARY, "toy-1"
    name = "toy"
    manifest = {"tokenizer": {"sha256": "t"}, "split": "the last ones", "sha256": {"heldout.bin": "h"}}  # noqa: RUF012

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        starts = rng.integers(0, VOCABULARY, size=(80, 1))
        blocks = ((starts + np.arange(LENGTH)) % VOCABULARY).astype(np.uint16)
        self.train, self.heldout = blocks[:64], blocks[64:]
        self.tokenizer = ToyTokenizer()


def toy_config(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "corpus": {"name": "toy", "length": LENGTH},
        "model": {"size": "test"},
        "stages": [
            {
                "name": "ce",
                "objective": "ce",
                "steps": 14,
                "lr": 1e-2,
                "warmup": 3,
                "learn_table": True,
                "learn_schedule": True,
            },
            {"name": "mse", "objective": "mse", "steps": 10, "lr": 5e-3, "lr_schedule": "cosine"},
        ],
        "batch": 8,
        "optimizer": {"clip": 1.0, "weight_decay": 0.01},
        "ema": {"decay": 0.9},
        "device": "cpu",
        "checkpoint_every": 4,
        "keep": 3,
        "evaluate_every": 5,
        "sample_every": 7,
    }
    return from_dict({**values, **copy.deepcopy(changes)})


def run_toy(
    out: Path,
    config: RunConfig,
    *,
    resume: bool = False,
    pause: float = 0.0,
    dropout: float = 0.0,
    die_at_rename: int = 0,
    stop_at: int = 0,
    prepare: Callable[[Trainer], None] | None = None,
    **calls: Any,
) -> TrainingEnd:
    """One training run in this process; `pause` slows each step down so that it can be killed in the middle."""
    from accelerate import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=config.accumulate)
    if pause:
        calls["advance"] = lambda *amount, **fields: time.sleep(pause)
    trainer = Trainer(config, ToyModel(dropout), ToyCorpus(), out, accelerator=accelerator, reporter=Reporter(**calls))
    if prepare is not None:
        prepare(trainer)
    if die_at_rename:
        _die_at_rename(die_at_rename)
    if stop_at and accelerator.is_main_process:
        original = trainer._train_step
        trainer._train_step = lambda step, tokens, stop: original(step, tokens, stop or step + 1 == stop_at)  # type: ignore[method-assign]
    return trainer.run(resume=resume)


def _die_at_rename(number: int) -> None:
    original, calls = Path.rename, []

    def rename(self: Path, target: Any) -> Path:
        calls.append(self)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, target)

    Path.rename = rename  # type: ignore[method-assign]


def _child(out: Path, config: dict[str, Any], rank: int, world: int, port: int, options: dict[str, Any]) -> None:
    if world > 1:
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world)
        )
    run_toy(out, from_dict(config), **options)
    if world > 1:
        torch.distributed.destroy_process_group()


def start(out: Path, config: RunConfig, *, world: int = 1, **options: Any) -> list[Any]:
    """Start a run in `world` other processes."""
    context = multiprocessing.get_context("forkserver")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=_child, args=(out, config.to_dict(), rank, world, port, options))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    return processes


def finish(processes: list[Any], seconds: float = 120) -> list[int]:
    """Wait for processes; their exit codes."""
    for process in processes:
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def kill(processes: list[Any]) -> None:
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join()


def losses(out: Path) -> list[float]:
    lines = (out / "journal.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]
