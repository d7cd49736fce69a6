"""What a run will cost, before it starts: parameters, memory, and time from a few trial steps on random tokens.

Memory of weights, gradients, optimizer and average is counted. The activations' is measured on the trial's rows and
scaled to the rows that are held at once. Time per step is measured on the same rows and scaled to the whole batch.
For several processes memory is counted for both ways to share the work, DDP and FSDP2. A network too large for a CPU
is not tried there: its memory is counted all the same, and of its time nothing is said.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from convergeflow.device import choose_device, reduced_products
from convergeflow.errors import UserError
from convergeflow.flow.grid import training_times
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.systems.protocol import LanguageModel
from convergeflow.training.config import RunConfig
from convergeflow.training.optimizer import StageOptimizer

TRIAL_TOKENS = 4096
"""Tokens in a trial step: enough to fill the machine, few enough to wait for."""
TRIAL_STEPS = 2
LARGE = 100_000_000
"""Parameters from which on a CPU says nothing about the time of a run."""
COUNTED_TOKENS = (32, 64)
"""Tokens of the two passes whose kept tensors are counted."""
WORLDS = (1, 8, 16)
"""Numbers of processes for which memory is shown: one, a node, two nodes."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one process of `world`, counted; activations as they are in float32, bfloat16 halves most of them."""

    world: int
    rows: int
    """Sequences held at once."""
    ddp: int
    fsdp: int
    activations: int


def memory(config: RunConfig, model: LanguageModel, worlds: tuple[int, ...] = WORLDS) -> list[MemoryNeed]:
    """What a process needs in the stage that needs most, for every number of processes that can share the batch.

    DDP holds everything whole, and the gradients a second time in its buckets. FSDP2 holds shards, and while a step is
    made the gathered weights too, and with `accumulate` the whole gradients that wait for their exchange.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained, once, per_token = 0, 0.0, 0.0
    for stage in config.stages:
        model.enter_stage(stage)  # a stage may need that the one before it has made a step
        trained = max(trained, _trained(model))
        # What grows with the tokens, and what does not: a table that is learned is kept as it was normalised.
        few, more = (_kept_bytes(config, model, tokens) for tokens in COUNTED_TOKENS)
        slope = (more - few) / (COUNTED_TOKENS[1] - COUNTED_TOKENS[0])
        once, per_token = max(once, few - slope * COUNTED_TOKENS[0]), max(per_token, slope)
    state = 4 * (2 * parameters + 3 * trained)  # weights and average; gradients and two moments
    found = []
    for world in worlds:
        if config.batch % (config.accumulate * world):
            continue
        rows = config.batch // (config.accumulate * world)
        gathered = 4 * (parameters + (trained if config.accumulate > 1 else 0)) if world > 1 else 0
        found.append(
            MemoryNeed(
                world=world,
                rows=rows,
                ddp=state + (4 * trained if world > 1 else 0),
                fsdp=state // world + gathered,
                activations=int(once + per_token * rows * config.corpus.length),
            )
        )
    return found


def _most_trained(config: RunConfig, model: LanguageModel) -> int:
    """Parameters that the stage with the most of them trains."""
    numbers = []
    for stage in config.stages:
        model.enter_stage(stage)
        numbers.append(_trained(model))
    return max(numbers)


def _trained(model: LanguageModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _kept_bytes(config: RunConfig, model: LanguageModel, length: int) -> int:
    """Bytes that the loss of a few tokens keeps for its backward pass, parameters apart."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    # Sequences that are shorter than the corpus's need several rows to have so many tokens.
    rows, device = -(-length // config.corpus.length), model.device
    tokens = torch.zeros(rows, length // rows, dtype=torch.long, device=device)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        draws = RowDraws(range(rows), device)
        loss = model.loss(tokens, times=training_times(rows, seed=0), draws=draws).total
    total = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    del loss
    return total


@dataclass(frozen=True)
class RunCost:
    """Numbers for one process."""

    parameters: int
    trained_parameters: int
    steps: int
    tokens_per_step: int
    state_bytes: int
    """Weights, gradients, optimizer moments and the average."""
    activation_bytes: int
    seconds_per_step: float | None
    """None where nothing was tried."""
    total_seconds: float | None
    device: str
    per_process: list[MemoryNeed]


def estimate(config: RunConfig, model: LanguageModel, vocabulary: int) -> RunCost:
    """Time and memory of a configuration by trial steps of each of its stages; the model is changed by them."""
    check_memory(config, vocabulary)
    placement = choose_device(config.device, config.precision)
    half = placement.autocast is not None
    model.to(placement.device)
    per_process = memory(config, model)
    held = config.batch // config.accumulate
    rows = max(1, min(held, TRIAL_TOKENS // config.corpus.length))
    torch.manual_seed(derive_seed(config.seed, "trial"))
    tokens = torch.randint(vocabulary, (rows, config.corpus.length)).to(placement.device)
    times = training_times(rows, seed=config.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if placement.device.type == "cpu" and parameters >= LARGE:
        alone = memory(config, model, (1,))[0]
        return RunCost(
            parameters=parameters,
            trained_parameters=_most_trained(config, model),
            steps=config.total_steps,
            tokens_per_step=config.batch * config.corpus.length,
            state_bytes=alone.ddp,
            activation_bytes=alone.activations,
            seconds_per_step=None,
            total_seconds=None,
            device="cpu",
            per_process=per_process,
        )
    total, peak, state, trained = 0.0, 0, 0, 0
    for stage in config.stages:
        model.enter_stage(stage)
        optimizer = StageOptimizer(model.named_parameters(), stage, config.optimizer)
        seconds = float("inf")
        for step in range(1 + TRIAL_STEPS):
            draws = RowDraws([derive_seed(config.seed, "trial", step, row) for row in range(rows)], placement.device)
            begin = time.perf_counter()
            reduced = reduced_products(placement.device, half and config.distill is None)
            with _peak_memory(placement.device) as peak_bytes, reduced:
                with torch.autocast(placement.device.type, placement.autocast, enabled=half):
                    loss = model.loss(tokens, times=times, draws=draws).total
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                float(loss.detach())
            if step:  # the first one warms up
                seconds = min(seconds, time.perf_counter() - begin)
                peak = max(peak, peak_bytes())
        learned = _trained(model)
        moments = sum(value.numel() * value.element_size() for value in optimizer.state().values())
        trained, state = max(trained, learned), max(state, 4 * (2 * parameters + learned) + moments)
        total += stage.steps * seconds * config.batch / rows
    return RunCost(
        parameters=parameters,
        trained_parameters=trained,
        steps=config.total_steps,
        tokens_per_step=config.batch * config.corpus.length,
        state_bytes=state,
        activation_bytes=int(peak * held / rows),
        seconds_per_step=total / config.total_steps,
        total_seconds=total,
        device=str(placement.device),
        per_process=per_process,
    )


def check_memory(config: RunConfig, vocabulary: int = 1, world: int = 1) -> None:
    """Refuse a run that no memory here can hold: less than it will need, counted before anything is built."""
    system, there = config.model.system, psutil.virtual_memory().total
    # Weights, gradients, two moments and the average, at 4 bytes each.
    state = 20 * (system.depth * 4 * system.width**2 + vocabulary * system.width)
    rows = config.batch // (config.accumulate * world)
    layers = 1 if config.recompute else system.depth
    activations = 4 * rows * config.corpus.length * system.width * (6 * layers + 4)
    for what, needed, fix in (
        ("a model of this size", state, "lower model.width or model.depth"),
        (f"a batch of {config.batch:,} sequences", activations, "lower batch, or raise accumulate"),
    ):
        if choose_device(config.device).device.type == "cpu" and needed > there:
            raise UserError(
                f"{what} needs at least {needed / 1e9:,.1f} GB, and this machine has {there / 1e9:,.1f} GB: {fix}"
            )


@contextmanager
def _peak_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """The most bytes in use above the start: the device's counter, or samples of this process's size."""
    if device.type != "cpu" and hasattr(torch.accelerator, "max_memory_allocated"):
        start = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        yield lambda: int(torch.accelerator.max_memory_allocated() - start)
        return
    process, done = psutil.Process(), threading.Event()
    sizes = [process.memory_info().rss]

    def watch() -> None:
        while not done.wait(0.002):
            sizes.append(process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: max(sizes) - sizes[0]
    finally:
        done.set()
        thread.join()
