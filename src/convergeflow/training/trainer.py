"""The training loop.

One optimizer step: the rows of the global batch and one stratified time per row are a function of (seed, step); each
process takes its slices, runs the model's loss on them, and gradients are averaged over slices and processes. Loss is a
mean over rows and slices have equal size, so neither accumulation nor the number of processes changes the curve.
"""

from __future__ import annotations

import contextlib
import copy
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from convergeflow import files
from convergeflow.data import provenance, stream
from convergeflow.data.corpus import Corpus
from convergeflow.device import compiles, reduced_products
from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.flow.grid import training_times
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.systems.protocol import LanguageModel, read_tensors, write_tensors
from convergeflow.training import checkpoint, sharding, watch
from convergeflow.training.ahead import Ahead
from convergeflow.training.config import RunConfig, refitted
from convergeflow.training.ema import WeightAverage
from convergeflow.training.interrupt import StopRequest, seconds_left
from convergeflow.training.journal import Journal, shown_loss
from convergeflow.training.optimizer import StageOptimizer

PACE_AFTER, PACE_EVERY = 10, 25
"""A run that ends by the clock compares its pace with its plan after so many steps, and again every so many."""
SLACK = (0.85, 1.3)
"""So much of what is left may fit into the time before the plan is changed."""


@dataclass(frozen=True)
class Reporter:
    """Where a run says what it does; the command line hands in its console."""

    advance: Callable[..., None] = field(default=lambda *amount, **fields: None)
    note: Callable[[str], None] = field(default=lambda message: None)
    warn: Callable[[str], None] = field(default=lambda message: None)
    prepare: Callable[[str, int, int | None], None] | None = None


@dataclass(frozen=True)
class Setup:
    """What stays the same through a run."""

    config: RunConfig
    corpus: Corpus
    out: Path
    accelerator: Accelerator
    reporter: Reporter

    @property
    def world(self) -> int:
        """The number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    @property
    def text(self) -> NDArray[Any]:
        """What rows are read from, [sequences, length]: the sequences of the corpus, or every window of its tokens."""
        return self.corpus.windows if self.config.corpus.windows == "random" else self.corpus.train

    @property
    def sharded(self) -> bool:
        return self.config.parallel == "fsdp" and self.world > 1

    @property
    def half(self) -> bool:
        """Whether the products of a step may be bfloat16's; not a student's, whose loss samples its teacher."""
        return self.accelerator.mixed_precision == "bf16" and self.config.distill is None

    @property
    def compiled(self) -> bool:
        chosen = self.config.compile
        return compiles(self.accelerator.device) if chosen == "auto" else chosen


@dataclass(frozen=True)
class TrainingEnd:
    """How a run ended."""

    step: int
    finished: bool
    checkpoint: Path
    signal_number: int = 0
    """Of the signal that stopped it."""
    evaluation: dict[str, float] | None = None

    @property
    def usable(self) -> bool:
        """Whether the run came to the end that was planned, by its steps or by its clock."""
        return self.finished or not self.signal_number


class Trainer:
    """Runs the stages of a configuration on a model and writes journal and checkpoints into `out`.

    A stage's loss must use every parameter that the stage trains: DDP waits for the gradient of each.
    """

    model: LanguageModel
    optimizer: StageOptimizer
    doorway: nn.Module
    journal: Journal | None

    def __init__(
        self,
        config: RunConfig,
        model: LanguageModel,
        corpus: Corpus,
        out: Path,
        *,
        accelerator: Accelerator,
        reporter: Reporter | None = None,
    ) -> None:
        self.setup = Setup(config, corpus, out, accelerator, reporter or Reporter())
        if config.batch % (self.setup.world * config.accumulate):
            raise UserError(
                f"batch {config.batch} cannot be shared by {self.setup.world} processes x accumulate="
                f"{config.accumulate}: give a multiple"
            )
        model.to(accelerator.device)
        # A sharded model cannot change which parameters it trains, so each stage shards a fresh copy of this one.
        self.blueprint = copy.deepcopy(model) if self.setup.sharded else model
        self.model = model
        self.ema = WeightAverage(model, config.ema)
        self.ema_doorway = sharding.Doorway(self.ema.model)
        if self.setup.sharded:
            sharding.shard(self.ema_doorway, training=False)
        self.moments: dict[str, Tensor] = {}
        self.evaluation: dict[str, float] | None = None

    @property
    def config(self) -> RunConfig:
        return self.setup.config

    @property
    def corpus(self) -> Corpus:
        return self.setup.corpus

    @property
    def accelerator(self) -> Accelerator:
        return self.setup.accelerator

    def run(self, *, resume: bool = False) -> TrainingEnd:
        """Train from the start, or from the newest whole checkpoint, to the last stage's end or a stop request."""
        start, kept = self._restore() if resume else (0, {})
        self._open_journal(start, kept)
        read_ahead = Ahead(self._tokens, self.accelerator.device, self.config.total_steps)
        try:
            with StopRequest() as stop:
                step, saved = self._steps(start, start if resume else -1, read_ahead, stop)
                number = stop.signal_number
        finally:
            read_ahead.close()
            if self.journal is not None:
                self.journal.close()
        folder = self.setup.out / checkpoint.FOLDER / f"{checkpoint.PREFIX}{saved:08d}"
        finished = step == self.config.total_steps
        return TrainingEnd(step, finished, folder, 0 if finished else number, self.evaluation)

    def _open_journal(self, start: int, kept: dict[str, Any]) -> None:
        """One process writes it; a new run begins with what is trained on what."""
        self.journal = None
        if self.accelerator.is_main_process:
            self.journal = Journal(self.setup.out, **kept, tensorboard=self.config.tensorboard)
        if start == 0:
            parameters = sum(parameter.numel() for parameter in self.model.parameters())
            self._write({"corpus": self.corpus.fingerprint, "parameters": parameters})
        self.setup.reporter.advance(start)

    def _steps(self, step: int, saved: int, read_ahead: Ahead, stop: StopRequest) -> tuple[int, int]:
        """Train from `step` on; returns the last step, and that of the last checkpoint (`saved` if there is none)."""
        clock, pace, stage, stopped = _Clock(step), _Clock(step), -1, False
        while step < self.config.total_steps and not stopped:
            index, local = self.config.stage_at(step)
            if index != stage:
                self._enter_stage(index, first=local == 0)
                stage = index
            asked = stop.asked
            with reduced_products(self.accelerator.device, self.setup.half):
                numbers, stopped = self._train_step(step, read_ahead(step), asked)
            if stopped and not asked:
                stop.signal_number = signal.SIGTERM  # another process was asked, and all end alike
            step += 1
            last = self._is_last(step, stage) or (stopped and not stop.signal_number)
            logged = self._log(step, stage, numbers, clock, last)
            self._look(step, stage, last)
            changed = not (last or stopped) and self._keep_pace(step, pace)
            if last or stopped or changed or step % self.config.checkpoint_every == 0:
                self._save(step)
                saved = step
            if changed and self.accelerator.is_main_process:
                files.write_json(self.setup.out / "run.json", self.config.to_dict())
            if logged:
                clock.restart(step)  # leaves out looking and saving
        return step, saved

    def _is_last(self, step: int, stage: int) -> bool:
        """Whether no further step of a stage follows."""
        return step == self.config.total_steps or self.config.stage_at(step)[0] != stage

    def _keep_pace(self, step: int, pace: _Clock) -> bool:
        """In a run with an end by the clock: fit what is left of the stages into the time, if that is far off."""
        made, left, planned = step - pace.step, seconds_left(), self.config.total_steps - step
        if math.isinf(left) or (made != PACE_AFTER and made % PACE_EVERY):
            return False
        fits = int(left / pace.seconds_per_step(step))
        if SLACK[0] * planned <= fits <= SLACK[1] * planned:
            return False
        self.setup = replace(self.setup, config=refitted(self.config, step, fits))
        steps = {stage.name: stage.steps for stage in self.config.stages}
        self._write({"step": step, "refitted": steps})
        self.setup.reporter.advance(0, total=self.config.total_steps)
        told = ", ".join(f"{name} {number}" for name, number in steps.items())
        self.setup.reporter.note(f"step {step}: the machine has another pace than in the trial; steps now: {told}")
        return True

    def _log(self, step: int, stage: int, numbers: dict[str, float], clock: _Clock, last: bool) -> bool:
        """Write down a step, if it is one to be written down."""
        if not last and step % self.config.log_every:
            self.setup.reporter.advance(1)
            return False
        self._write({"step": step, "stage": self.config.stages[stage].name, **numbers})
        seconds = clock.seconds_per_step(step)
        rate = self.config.batch * self.corpus.length / seconds
        if self.journal is not None:
            self.journal.time({"step": step, "seconds": seconds, "tokens_per_second": rate})
        self.setup.reporter.advance(1, loss=round(shown_loss(numbers), 4), **{"tok/s": round(rate)})
        return True

    def _look(self, step: int, stage: int, last: bool) -> None:
        """Evaluate and sample, if it is time to."""
        config, shown = self.config, (self.ema_doorway, self.corpus, self.config, self.accelerator)
        where = f"step {step}/{config.total_steps} ({config.stages[stage].name})"
        if last or (config.evaluate_every and step % config.evaluate_every == 0):
            self.evaluation = watch.evaluate(*shown)
            self._write({"step": step, "evaluate": self.evaluation})
            self.setup.reporter.note(f"{where}  {watch.in_words(self.evaluation)}")
        if last or (config.sample_every and step % config.sample_every == 0):
            texts = watch.sample_texts(*shown)
            self._write({"step": step, "samples": texts})
            self.setup.reporter.note(f"{where}  sample: {texts[0]}")

    def _rows(self, part: int) -> range:
        """The rows of the global batch that this process takes in a slice of a step."""
        size = self.config.batch // (self.setup.world * self.config.accumulate)
        first = (part * self.setup.world + self.setup.rank) * size
        return range(first, first + size)

    def _sequences(self, step: int) -> np.ndarray:
        """Which sequences of the corpus are the rows of a step."""
        return stream.rows(self.config.seed, step, self.config.batch, len(self.setup.text))

    def _tokens(self, step: int) -> Tensor:
        """What this process reads for a step, [accumulate, rows, length]."""
        chosen = self._sequences(step)
        parts = (self._rows(part) for part in range(self.config.accumulate))
        return torch.stack([watch.read_tokens(self.setup.text, chosen[rows.start : rows.stop]) for rows in parts])

    def _train_step(self, step: int, tokens: Tensor, stop: bool) -> tuple[dict[str, float], bool]:
        config, device = self.config, self.accelerator.device
        index, local = config.stage_at(step)
        lr = self.optimizer.set_rate(config.stages[index].rate(local))
        times = training_times(config.batch, seed=derive_seed(config.seed, "times", step))
        torch.manual_seed(derive_seed(config.seed, "dropout", step, self.setup.rank))
        self.doorway.train()
        sums: dict[str, Tensor] = {}
        for part in range(config.accumulate):
            rows = self._rows(part)
            draws = RowDraws([derive_seed(config.seed, "noise", step, row) for row in rows], device)
            with self._exchange(part == config.accumulate - 1):
                with self.accelerator.autocast():
                    loss, parts = self.doorway("loss", tokens[part], times=times[rows.start : rows.stop], draws=draws)
                self.accelerator.backward(loss)  # divides by the number of slices
            for name, value in {"loss": loss.detach().float(), **parts}.items():
                sums[name] = sums.get(name, 0) + value / config.accumulate
        if self.setup.sharded:
            sharding.average_scalar_gradients(self.doorway)
        norm = sharding.gradient_norm(self.optimizer.main_parameters(), config.optimizer.clip)
        # One exchange and one read per step: the numbers of the journal, and whether any process was asked to stop.
        asked = torch.full((), float(stop), device=device)
        packed = torch.stack([*sums.values(), norm.to(device, torch.float32), asked])
        *values, grad_norm, stopped = self.accelerator.reduce(packed, reduction="mean").tolist()
        numbers = {**dict(zip(sums, values, strict=True)), "lr": lr, "grad_norm": grad_norm}
        self._check_finite(numbers, step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update(self.model, step + 1)
        return numbers, stopped > 0

    def _check_finite(self, numbers: dict[str, float], step: int) -> None:
        wrong = [name for name in ("loss", "grad_norm") if not math.isfinite(numbers[name])]
        if wrong:
            blocks = self._sequences(step)
            shown = ", ".join(str(block) for block in blocks[:8]) + (", ..." if len(blocks) > 8 else "")
            raise ConvergeFlowError(
                f"{wrong[0]} is {numbers[wrong[0]]} at step {step + 1} (stage {self.optimizer.stage.name!r}, "
                f"training sequences {shown}); nothing was updated: lower the learning rate or set optimizer.clip, "
                "then start again or go on from the last checkpoint with `resume`"
            )

    def _enter_stage(self, index: int, *, first: bool) -> None:
        """Prepare a stage; `first` says that none of its steps was made yet."""
        stage = self.config.stages[index]
        self.setup.reporter.advance(0, stage=f"{stage.name} ({index + 1} of {len(self.config.stages)})")
        if first and index and stage.from_average:
            for target, source in zip(self.model.parameters(), self.ema.model.parameters(), strict=True):
                sharding.local(target.data).copy_(sharding.local(source))
        if first and index and stage.keep_moments and not self.moments:  # a resumed run has read them
            self.moments = self.optimizer.state()
        if self.setup.sharded:
            weights = sharding.full_state(self.model)
            self.model = copy.deepcopy(self.blueprint)
            sharding.load_state(self.model, weights)
        self.model.enter_stage(stage)
        doorway = sharding.Doorway(self.model)
        if self.setup.sharded:
            self.doorway = sharding.shard(doorway, training=True)
        else:
            self.accelerator.free_memory()
            self.doorway = self.accelerator.prepare_model(doorway)
        if self.setup.compiled:
            # The trunk alone: what surrounds it draws from per-row generators, which a graph cannot hold.
            trunks = [module for name, module in self.model.named_modules() if name.endswith("backbone")]
            (trunks or [self.model])[0].compile()
        if first:
            self.ema.adopt_frozen(self.model)
        self.optimizer = StageOptimizer(self.model.named_parameters(), stage, self.config.optimizer)
        if not first or stage.keep_moments:
            self.optimizer.load(self.moments, missing_ok=first)
        self.moments = {}

    @contextlib.contextmanager
    def _exchange(self, now: bool) -> Iterator[None]:
        """Exchange gradients in the backward pass of the last slice only."""
        if self.setup.sharded:
            sharding.gather_gradients(self.doorway, now)
            yield
        elif now:
            yield
        else:
            with self.accelerator.no_sync(self.doorway):
                yield

    def _write(self, record: dict[str, Any]) -> None:
        if self.journal is not None:
            self.journal.write(record)

    def _save(self, step: int) -> None:
        weights, average = sharding.full_state(self.model), sharding.full_state(self.ema.model)
        moments = self.optimizer.state()
        if self.journal is not None:
            state = {
                "step": step,
                "stage": self.optimizer.stage.name,
                "journal_bytes": self.journal.sync(),
                "journal_sha256": self.journal.sha256,
                "world": self.setup.world,
                "corpus": self.corpus.fingerprint,
                "evaluation": self.evaluation,
            }

            def write(folder: Path) -> None:
                self._write_model(folder, self.model, weights)
                write_tensors(folder / "ema.safetensors", average)
                write_tensors(folder / "optimizer.safetensors", moments)
                checkpoint.write_json(folder / "trainer.json", state)
                checkpoint.write_json(folder / "run.json", self.config.to_dict())

            checkpoint.save_step(self.setup.out, step, write, keep=self.config.keep, keep_every=self.config.keep_every)
        self.accelerator.wait_for_everyone()

    def _write_model(self, folder: Path, model: LanguageModel, weights: dict[str, Tensor]) -> None:
        """The part of a checkpoint that generation needs: config, weights, tokenizer."""
        if self.setup.sharded:
            # What a model writes into its config may come from its weights, and a shard has only a part of those.
            model = self.blueprint
            sharding.load_state(model, weights)
        model.save_pretrained(folder, state_dict=weights)
        self.corpus.tokenizer.save(folder)
        provenance.remember(folder, self.corpus)

    def export(self, target: Path, card: str) -> None:
        """The averaged model as a folder of its own, for generation; every process must call it."""
        average = sharding.full_state(self.ema.model)
        if self.accelerator.is_main_process:

            def write(folder: Path) -> None:
                self._write_model(folder, self.ema.model, average)
                checkpoint.write_json(folder / "run.json", self.config.to_dict())
                (folder / "card.md").write_text(card, encoding="utf-8")

            checkpoint.write_folder(target, write)
        self.accelerator.wait_for_everyone()

    def _restore(self) -> tuple[int, dict[str, Any]]:
        """Go back to the newest whole checkpoint: its step, and what of the journal is kept."""
        folder = checkpoint.newest_whole(self.setup.out, self.setup.reporter.warn)
        if folder is None:
            self.setup.reporter.note(f"no whole checkpoint in {self.setup.out}: starting at step 0")
            return 0, {}
        state = files.read_json(folder / "trainer.json", checkpoint.TrainerState, finite=False)
        if state["corpus"] != self.corpus.fingerprint:
            raise UserError(f"{folder} was trained on corpus {state['corpus']}, this one is {self.corpus.fingerprint}")
        if state["world"] != self.setup.world:
            self.setup.reporter.warn(
                f"resuming on {self.setup.world} processes a run of {state['world']}: sums will differ in the last "
                f"bits; for the same ones go on with {state['world']}"
            )
        sharding.load_state(self.model, read_tensors(folder / "model.safetensors"))
        sharding.load_state(self.ema.model, read_tensors(folder / "ema.safetensors"))
        self.moments = read_tensors(folder / "optimizer.safetensors")
        self.evaluation = state["evaluation"]
        if self.accelerator.is_main_process:
            config = self.config
            checkpoint.remove_older(self.setup.out, state["step"], keep=config.keep, keep_every=config.keep_every)
        self.setup.reporter.note(f"resuming from {folder}")
        return state["step"], {"keep_bytes": state["journal_bytes"], "keep_sha256": state.get("journal_sha256")}


class _Clock:
    """Time per step since the last restart."""

    def __init__(self, step: int) -> None:
        self.restart(step)

    def restart(self, step: int) -> None:
        self.began, self.step = time.perf_counter(), step

    def seconds_per_step(self, step: int) -> float:
        return (time.perf_counter() - self.began) / (step - self.step)
