"""A whole training run: configuration in, folder out.

OUT/run.json                the resolved configuration
OUT/journal.jsonl           numbers of every step; OUT/timing.jsonl has the clocks
OUT/checkpoints/step-N/     what resuming needs, the newest few
OUT/model/                  at the end: the averaged model, ready for `generate`
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, InitProcessGroupKwargs

from convergeflow import files
from convergeflow.data.corpus import Corpus
from convergeflow.device import bfloat16_pays, choose_device
from convergeflow.errors import UserError
from convergeflow.model.network import Shape
from convergeflow.systems.protocol import LanguageModel
from convergeflow.training import checkpoint, journal
from convergeflow.training.build import build_model, introduce, load_weights, open_corpus, tell_frequencies
from convergeflow.training.card import write_card
from convergeflow.training.config import RunConfig, from_dict
from convergeflow.training.estimate import check_memory
from convergeflow.training.recipes import apply_overrides
from convergeflow.training.trainer import Reporter as Reporter
from convergeflow.training.trainer import Trainer, TrainingEnd

RUN_FILE = "run.json"
TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others: for the slowest disk that a checkpoint is written to, not for ever."""
MODEL_FOLDER = checkpoint.MODEL_FOLDER
OURS = (journal.FILE, journal.TIMING, checkpoint.FOLDER, MODEL_FOLDER, journal.BOARD)
"""What a run writes besides its configuration."""

# What may change when a run goes on: nothing that the steps already made depended on.
HOW_IT_RUNS = ("device", "compile", "recompute", "parallel", "accumulate")
WHAT_IT_WRITES = ("checkpoint_every", "keep", "keep_every", "log_every", "tensorboard")
HOW_IT_IS_WATCHED = ("evaluate_every", "evaluate_blocks", "sample_every", "sample_nfe")
FREE_ON_RESUME = (*HOW_IT_RUNS, *WHAT_IT_WRITES, *HOW_IT_IS_WATCHED)

Build = Callable[[RunConfig, int], LanguageModel]
"""The model at the start of a run, from its configuration and the size of its vocabulary."""


def saved_config(out: Path, overrides: Sequence[str] = (), *, wanted: RunConfig | None = None) -> RunConfig:
    """The configuration of a run to be resumed; a change that would contradict its first part is refused.

    Changes are overrides to the saved configuration, or `wanted` as a whole.
    """
    before = _config_on_disk(out)
    after = wanted or from_dict(apply_overrides(before.to_dict(), overrides))
    fixed = "cannot change on resume; start a new run in another `out`"
    if wanted is not None:
        fixed += ", or name no recipe to go on with the run's own settings"
    if key := _first_change(before, after):
        raise UserError(f"{key} {fixed}")
    return after


def _first_change(before: RunConfig, after: RunConfig) -> str | None:
    """The first key that may not change within a run and did; the last stage may become longer or shorter."""
    old, new = before.to_dict(), after.to_dict()
    last = len(before.stages) - 1
    if len(old["stages"]) != len(new["stages"]):
        return "the number of stages"
    for number, (left, right) in enumerate(zip(old["stages"], new["stages"], strict=True)):
        for key in left:
            if left[key] != right[key] and (key, number) != ("steps", last):
                return f"stages.{number}.{key}"
    return next((key for key in old if key not in (*FREE_ON_RESUME, "stages") and old[key] != new[key]), None)


def _config_on_disk(out: Path) -> RunConfig:
    """What a run was started with. The copy in its newest checkpoint, which has a hash, is believed before run.json."""
    path = out / RUN_FILE
    folder = checkpoint.newest_whole(out, lambda message: None)
    kept = None if folder is None else from_dict(files.read_json(folder / RUN_FILE))
    if not path.is_file() and kept is None:
        raise UserError(f"nothing to resume in {out}: there is no {RUN_FILE} (leave `resume` out to start)")
    try:
        found = from_dict(files.read_json(path))
    except UserError as damage:
        if kept is None:
            raise UserError(f"{damage}; there is no checkpoint to go on from: delete {out} and start again") from None
        return kept
    if kept is not None and (key := _first_change(kept, found)):
        raise UserError(f"{path} was edited: {key} is not what its checkpoints have; delete the file to go on")
    return found


def make_accelerator(config: RunConfig) -> Accelerator:
    """The processes, the device and the number format of a configuration."""
    placement = choose_device(config.device, config.precision)
    return Accelerator(
        cpu=placement.device.type == "cpu",
        mixed_precision="no" if placement.autocast is None else "bf16",
        gradient_accumulation_steps=config.accumulate,
        # Older versions of torch keep the cast of a weight that a pass without gradients made, and give it to the next
        # pass: where self-conditioning came first, the trunk had no gradient (pytorch#112583).
        kwargs_handlers=[InitProcessGroupKwargs(timeout=TIMEOUT), AutocastKwargs(cache_enabled=False)],
    )


def _corpus_of_all(config: RunConfig, accelerator: Accelerator, reporter: Reporter) -> Corpus:
    """The corpus, for every process; the first prepares it, unless the others would have to wait too long."""
    refusal: UserError | None = None
    with accelerator.main_process_first():
        try:
            # The other processes wait here, and the process group gives up after minutes.
            progress = reporter.prepare if accelerator.is_main_process else None
            return open_corpus(config, progress, large=accelerator.num_processes == 1)
        except UserError as failure:
            refusal = failure  # nobody may be left waiting: every process finds it, and leaves together with the others
    raise refusal


def train(
    config: RunConfig,
    out: Path,
    *,
    resume: bool = False,
    init_from: Path | None = None,
    reporter: Reporter | None = None,
    accelerator: Accelerator | None = None,
    build: Build = build_model,
) -> TrainingEnd:
    """Run a configuration into `out`; afterwards `out/model` holds the averaged model, unless a signal stopped it."""
    reporter = reporter or Reporter()
    if config.distill is not None and build is build_model:
        raise UserError(
            f"this run learns from the teacher {config.distill.teacher}: start it with `convergeflow distill`"
        )
    if resume and init_from is not None:
        raise UserError("`init_from` starts a run and `resume` goes on with one: give one of them")
    if out.exists() and not out.is_dir():
        raise UserError(f"`out` {out} is a file, not a folder")
    if not resume:
        refuse_other_files(out)
    accelerator = accelerator or make_accelerator(config)
    check_memory(config, world=accelerator.num_processes)
    try:
        with contextlib.ExitStack() as held:
            if accelerator.is_main_process:
                out.mkdir(parents=True, exist_ok=True)
                held.enter_context(files.only_writer(out, f"the run in {out}"))
            return _train(config, out, resume, init_from, reporter, accelerator, build)
    except UserError:
        with contextlib.suppress(OSError):  # a refused run leaves nothing behind; a folder with anything in it stays
            out.rmdir()
        raise


def refuse_other_files(out: Path) -> None:
    """A new run takes an empty place: whatever else is there is somebody's, and would be overwritten."""
    if (out / RUN_FILE).exists():
        raise UserError(f"{out} already holds a run: add `resume` to go on with it, or choose another `out`")
    for name in OURS:
        if os.path.lexists(out / name):
            raise UserError(f"{out} has a {name} and no {RUN_FILE}, so it is no run of ours: choose another `out`")


def start_from(folder: Path, model: LanguageModel, corpus: Corpus, config: RunConfig, reporter: Reporter) -> None:
    """Take over the weights of a checkpoint, with a new vocabulary if the corpus has another one."""
    new = load_weights(model, folder, corpus.tokenizer)
    if new is None:
        return
    learns = any(stage.learn_table for stage in config.stages)
    if new and isinstance(config.model.system, Shape) and not learns:
        raise UserError(
            f"{new} tokens of the corpus are new to `init_from` {folder}, and no stage learns the table: set "
            "learn_table in one, or prepare the text with the checkpoint's tokenizer"
        )
    tell_frequencies(model, corpus, config)  # those of the new text
    known = corpus.vocabulary - new
    reporter.note(f"new vocabulary: {known} of {corpus.vocabulary} tokens keep their rows, the others start fresh")


def _train(
    config: RunConfig,
    out: Path,
    resume: bool,
    init_from: Path | None,
    reporter: Reporter,
    accelerator: Accelerator,
    build: Build,
) -> TrainingEnd:
    quiet = not accelerator.is_main_process
    if config.parallel == "fsdp" and accelerator.num_processes == 1:
        reporter.warn("parallel=fsdp has no effect: there is only one process")
    if accelerator.mixed_precision == "bf16" and not bfloat16_pays(accelerator.device):
        reporter.warn("this CPU has no instructions for bfloat16, so precision=bf16 is slow here: fp32 is faster")
    corpus = _corpus_of_all(config, accelerator, reporter)
    if len(corpus.train) == 0 or len(corpus.heldout) == 0:
        raise UserError(f"corpus {corpus.name!r} has too little text for sequences of {corpus.length} tokens")
    if accelerator.is_main_process:
        corpus.verify()
    check_memory(config, corpus.vocabulary, accelerator.num_processes)
    model = build(config, corpus.vocabulary)
    introduce(model, corpus, config)
    if init_from is not None:
        start_from(init_from, model, corpus, config, reporter)
    trainer = Trainer(config, model, corpus, out, accelerator=accelerator, reporter=None if quiet else reporter)
    if accelerator.is_main_process:
        files.write_json(out / RUN_FILE, config.to_dict())
    outcome = trainer.run(resume=resume)
    if outcome.usable:
        parameters = sum(parameter.numel() for parameter in trainer.blueprint.parameters())
        card = write_card(trainer.config, corpus, parameters, outcome.step, outcome.evaluation)
        trainer.export(out / MODEL_FOLDER, card)
    return outcome
