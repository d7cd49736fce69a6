"""A run for a text that nobody prepared: tokenizer, size, stages, batch and steps are chosen, and every choice is told.

What is known about small flows (docs/log/basic-small.md) is in the recipe `own-text`. Here it is fitted to the text, to
the machine, by a few trial steps, and to the time. What the user gives as `key=value` is never chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergeflow.data import CORPORA
from convergeflow.data.corpus import Corpus
from convergeflow.data.prepare import prepare
from convergeflow.data.sources import Progress
from convergeflow.data.tokenizer import Tokenizer
from convergeflow.data.unprepared import LENGTH, MOST_TOKENS, Decision, Look, can_write, look, settings
from convergeflow.errors import UserError
from convergeflow.systems import class_of_type
from convergeflow.systems.config import read_config
from convergeflow.training.build import build_model, open_corpus
from convergeflow.training.checkpoint import MODEL_FOLDER
from convergeflow.training.config import Origins, RunConfig, assembled, from_dict, mark_scaled, scaled
from convergeflow.training.estimate import RunCost, estimate
from convergeflow.training.recipes import parse_override, put, read_recipe

RECIPE = "own-text"
DEFAULT_MINUTES = 10.0
BYTES_PER_MINUTE = 4e6
"""Text that is prepared for each minute of the run: several times what so many steps can read on a CPU."""
LEAST_BYTES = 1 << 16
"""Text that is prepared however short the time: what cannot be done in it is said later, of a text that was read."""
SIZES_BY_STEPS: tuple[tuple[int, dict[str, int]], ...] = (
    (6000, {"width": 192, "depth": 6, "heads": 6}),
    (2000, {"width": 128, "depth": 6, "heads": 4}),
    (60, {"width": 128, "depth": 4, "heads": 4}),
    (0, {"width": 64, "depth": 3, "heads": 2}),
)
"""Steps that must fit into the time, and the size of network that is worth it then: a larger one learns more from a
step, and makes fewer of them."""
MANY_EPOCHS = 3
"""Rounds through the text from which on sequences begin at any token, and words are dropped out."""
DROPOUT = 0.1
LOOKS, STEPS_PER_LOOK = 4, 150
"""Evaluations along a run, besides those at the end of a stage: at most so many, and after so many steps."""
LOOK_STEPS = 9
"""What an evaluation with sample texts costs, in training steps: passes of 32 sequences at ten noise levels."""
CLOSING = 6.0
"""Seconds for what comes before the first and after the last step: loading, saving, the model folder."""
CAUTION = 1.1
"""Steps of a run are a little slower than trial steps: other programs, the average, the journal."""
GENTLE = 1 / 3
"""Learning rates of a model that starts from another one, relative to those of a new one."""

DECIDED_BY_CORPUS = tuple(("corpus", name) for name in ("tokenizer", "vocabulary", "length"))

Say = Callable[[Decision], None]


@dataclass(frozen=True)
class RunPlan:
    """A configuration, where its values come from, and what was decided for the user."""

    config: RunConfig
    given: Origins
    corpus: Corpus
    choices: list[Decision]
    cost: RunCost | None
    """Of the configuration before it was fitted into the time."""

    def closing_seconds(self) -> float:
        """What the end of the run takes: one look at the model, and writing it."""
        step = 0.0 if self.cost is None else self.cost.seconds_per_step or 0.0
        return CLOSING / 2 + CAUTION * LOOK_STEPS * step


def plan_recipe(
    recipe: str, overrides: Sequence[str], *, minutes: float, began: float, progress: Progress | None = None
) -> RunPlan:
    """A recipe whose stages are scaled, all in proportion, so that it ends `minutes` after the moment `began`."""
    values, given = assembled(read_recipe(recipe), overrides, f"recipe {recipe}")
    corpus = open_corpus(from_dict(values), progress)
    choices: list[Decision] = []
    cost, steps = _fit(values, corpus, minutes, began, None, lambda *what: choices.append(Decision(*what)))
    config = scaled(from_dict(values), steps)
    return RunPlan(config, mark_scaled(config, given), corpus, choices, cost)


def plan_for_text(
    sources: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    minutes: float | None = None,
    steps: int | None = None,
    init_from: Path | None = None,
    began: float | None = None,
    say: Say = lambda choice: None,
    progress: Progress | None = None,
) -> RunPlan:
    """A run on files, folders, a prepared corpus or a named one, that ends `minutes` after the moment `began`.

    With `steps` it has so many instead. With `init_from` size and, if it can write the text, tokenizer are those of
    that checkpoint. `say` hears every choice.
    """
    began = time.monotonic() if began is None else began
    choices: list[Decision] = []

    def decide(*what: str) -> None:
        choices.append(Decision(*what))
        say(choices[-1])

    changes = dict(parse_override(text) for text in overrides)
    if steps is None and minutes is None:
        minutes = DEFAULT_MINUTES
        decide("time", f"{minutes:g} minutes", "nobody said how long")
    corpus = _corpus(sources, changes, minutes, init_from, decide, progress)
    values = read_recipe(RECIPE)
    values["corpus"] = {"name": str(corpus.folder), "vocabulary": corpus.vocabulary, "length": corpus.length}
    if init_from is not None:
        _start_from(values, init_from, decide)
    rest = [text for text in overrides if parse_override(text)[0] not in DECIDED_BY_CORPUS]
    values, given = assembled(values, rest, f"recipe {RECIPE}")
    given |= dict.fromkeys([("corpus", name) for name in values["corpus"]], "the corpus")
    fixed = {path for path, origin in given.items() if origin == "command line"}

    def choose(path: tuple[str, ...], value: Any) -> None:
        if path not in fixed:
            put(values, path, value)
            given[path] = "chosen"

    cost = None
    if minutes is not None:
        free = init_from is None and not fixed & {("model", name) for name in ("width", "depth", "heads", "size")}
        cost, steps = _fit(values, corpus, minutes, began, choose if free else None, decide)
    assert steps is not None
    _suit_repetition(values, corpus, steps, choose, decide)
    every = -(-steps // (_looks(steps) + 1))
    choose(("evaluate_every",), every)
    choose(("checkpoint_every",), every)
    config = scaled(from_dict(values), steps)
    for stage in config.stages:
        why = {
            "ce": "learns the words' vectors and the noise schedule",
            "mse": "the paper's objective, with both fixed",
        }
        decide(f"stage {stage.name}", f"{stage.steps} steps of {config.batch} sequences", why[stage.objective])
    return RunPlan(config, mark_scaled(config, given), corpus, choices, cost)


def _corpus(
    sources: Sequence[str],
    changes: Mapping[tuple[str, ...], Any],
    minutes: float | None,
    init_from: Path | None,
    decide: Callable[..., None],
    progress: Progress | None,
) -> Corpus:
    """The prepared corpus of what the user named."""
    asked = {path[1]: value for path, value in changes.items() if path[0] == "corpus" and len(path) == 2}
    given = {name: value for name, value in asked.items() if ("corpus", name) in DECIDED_BY_CORPUS}
    if unknown := sorted(asked.keys() - given.keys() - {"windows"}):
        raise UserError(f"corpus.{unknown[0]} is for recipes: name the text itself, or prepare it and name its folder")
    first = sources[0]
    if len(sources) == 1 and (Path(first) / "manifest.json").is_file():
        return _as_prepared(first, given, decide)
    if len(sources) == 1 and (first in CORPORA or first.startswith("hf:")):
        usual: dict[str, Any] = {"tokenizer": "word-byte", "vocabulary": MOST_TOKENS}
        if first == "stories":
            usual = {}
        elif init_from is not None:
            usual = {"tokenizer": str(init_from)}
        return prepare(first, progress=progress, **{**usual, **given})
    found = look([Path(source) for source in sources])
    if init_from is not None:
        given = _like_checkpoint(init_from, found, given, decide)
    most = max(LEAST_BYTES, BYTES_PER_MINUTE * minutes) if minutes is not None else float("inf")
    how, choices = settings(found, given, most)
    for choice in choices:
        decide(*choice)
    return prepare(list(sources), progress=progress, **how)


def _as_prepared(folder: str, given: Mapping[str, Any], decide: Callable[..., None]) -> Corpus:
    """A corpus that is there; what the user says about it must be so."""
    corpus = Corpus.open(folder)
    facts = {"tokenizer": corpus.tokenizer.kind, "vocabulary": corpus.vocabulary, "length": corpus.length}
    for name, value in given.items():
        if value != facts[name]:
            raise UserError(f"the corpus in {folder} has the {name} {facts[name]}, not {value}: prepare it again")
    decide("corpus", f"{corpus.vocabulary} tokens, sequences of {corpus.length}", "as it was prepared")
    return corpus


def _like_checkpoint(
    folder: Path, found: Look, given: Mapping[str, Any], decide: Callable[..., None]
) -> dict[str, Any]:
    """Length and, where it can write the text, tokenizer of a checkpoint, unless the user says otherwise."""
    wanted: dict[str, Any] = {"length": read_config(folder).get("length", LENGTH), **given}
    before = Tokenizer.load(folder)
    if "tokenizer" not in given and "vocabulary" not in given and can_write(before, found.text):
        wanted["tokenizer"] = str(folder)
        size = f"{before.kind}, {before.size} tokens"
        decide("tokenizer", size, f"that of {_label(folder)}, which can write the text")
    return wanted


def _label(folder: Path) -> str:
    """What a checkpoint folder is called: by its run, if it is the model of one."""
    return folder.parent.name if folder.name == MODEL_FOLDER else folder.name


def _start_from(values: dict[str, Any], folder: Path, decide: Callable[..., None]) -> None:
    """Size, kind and rates of a model that goes on from a checkpoint."""
    stored = read_config(folder)
    kind = class_of_type(stored["model_type"])
    config = kind.config_class.from_dict(stored, folder)
    shape = config.to_dict()
    own = {name: shape[name] for name in config.options()}
    if "schedule" in own:
        own["schedule"] = {**own["schedule"], "entropy": None}
    values["model"] = {"method": shape.get("method") or kind.method, "size": None, **own}
    if getattr(config, "predictor", None) == "direct":
        values["stages"] = values["stages"][-1:]  # it has no weights that a cross-entropy could teach
    for stage in values["stages"]:
        for rate in ("lr", "matrix_lr", "table_lr"):
            if rate in stage:
                stage[rate] *= GENTLE
    decide(
        "model",
        f"{shape['depth']} layers of width {shape['width']}",
        f"those of {_label(folder)}, from whose weights it starts",
    )
    decide("learning rates", "a third of a new model's", "what the checkpoint knows is to be kept")


def _fit(
    values: dict[str, Any],
    corpus: Corpus,
    minutes: float,
    began: float,
    choose: Callable[[tuple[str, ...], Any], None] | None,
    decide: Callable[..., None],
) -> tuple[RunCost, int]:
    """What a step costs, and how many fit into the time; `choose` sets the size of network that suits it."""
    end = began + 60 * minutes

    def measured() -> tuple[RunCost, int]:
        config = from_dict(values)
        cost = estimate(config, build_model(config, corpus.vocabulary), corpus.vocabulary)
        seconds = CAUTION * (cost.seconds_per_step or float("inf"))
        fit = int((end - time.monotonic() - CLOSING) / seconds)
        return cost, max(0, fit - LOOK_STEPS * (_looks(fit) + len(config.stages)))

    cost, steps = measured()
    if choose is not None:
        was = values["model"]
        now = {name: was[name] for name in ("width", "depth", "heads")}
        here = _work(now, corpus.vocabulary)
        fits = {needed: steps * here / _work(size, corpus.vocabulary) for needed, size in SIZES_BY_STEPS}
        size = next(size for needed, size in SIZES_BY_STEPS if fits[needed] >= needed)
        if size != now:
            for name, value in size.items():
                choose(("model", name), value)
            cost, steps = measured()
        layers = (
            f"{values['model']['depth']} layers of width {values['model']['width']}, {cost.parameters:,} parameters"
        )
        decide("model", layers, f"a step takes {cost.seconds_per_step:.2g} s here, so {steps:,} fit into the time")
    if time.monotonic() >= end:
        spent = (time.monotonic() - began) / 60
        raise UserError(f"{minutes:g} minutes are too short: reading the text and trying steps took {spent:.2g}")
    return cost, max(len(values["stages"]), steps)  # if even these are too many, the clock ends the run


def _looks(steps: int) -> int:
    """Evaluations along a run of so many steps."""
    return min(LOOKS, steps // STEPS_PER_LOOK)


def _work(size: Mapping[str, int], vocabulary: int) -> float:
    """Multiplications for one token, about: layers, and four passes over the vocabulary."""
    return 12 * size["width"] ** 2 * size["depth"] + 4 * size["width"] * vocabulary


def _suit_repetition(
    values: dict[str, Any],
    corpus: Corpus,
    steps: int,
    choose: Callable[[tuple[str, ...], Any], None],
    decide: Callable[..., None],
) -> None:
    """A short text is read many times over: begin at any token, and drop out, against learning it by heart."""
    epochs = steps * int(values["batch"]) / len(corpus.train)
    if epochs < MANY_EPOCHS:
        return
    choose(("corpus", "windows"), "random")
    choose(("model", "dropout"), DROPOUT)
    decide("against repetition", f"random beginnings, dropout {DROPOUT:g}", f"the text is read {epochs:.0f} times over")
