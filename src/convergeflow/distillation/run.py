"""From a teacher's name to a training run: its network, its text and a recipe make one configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convergeflow import files, zoo
from convergeflow.distillation.student import Student, Teacher
from convergeflow.errors import UserError
from convergeflow.systems.convergeflow import ConvergeFlowModel
from convergeflow.systems.options import settings_of
from convergeflow.training.config import RunConfig, from_dict
from convergeflow.training.recipes import apply_overrides, read_recipe

RECIPE = "swift"
PRESET = "swift"
"""The sampling preset that a student takes if the user names none."""


def configuration(teacher: str, recipe: str = RECIPE, overrides: Sequence[str] = ()) -> RunConfig:
    """A recipe with the network and the text of a teacher in the place of its own, and with overrides."""
    folder, model = zoo.locate(teacher), load_teacher(teacher)
    values = read_recipe(recipe)
    if not isinstance(values.get("distill"), dict):
        raise UserError(f"{recipe} is a recipe for `convergeflow train`: one for a student has a section `distill`")
    values["distill"] |= {"teacher": teacher, "weights": zoo.weights_hash(folder)}
    own = {name: getattr(model.config, name) for name in model.config.options()}
    values["model"] = {**own, "size": None, "preset": PRESET}
    values["corpus"] = {**_text_of(folder, overrides), "length": model.config.length}
    config = from_dict(apply_overrides(values, overrides))
    with_settings(model, config)  # refused now, if it cannot be sampled so
    return config


def _text_of(folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The corpus that a teacher was trained on, as its folder says; else the user must name one."""
    path = folder / "run.json"
    found = files.read_json(path).get("corpus") if path.is_file() else None
    if found is None and not any(text.startswith(("corpus.name=", "corpus.paths=")) for text in overrides):
        raise UserError(
            f"{folder} does not say what its text was: add corpus.name=NAME (see `convergeflow train --help`)"
        )
    return dict(found or {})


def load_teacher(name: str) -> ConvergeFlowModel:
    """A model that can teach: a flow with weights over the token table."""
    model = zoo.load_model(name, device="cpu")
    flow = model.as_flow()
    if flow is None:
        raise UserError(f"{name} is a model of {model.method}: a teacher must be a flow over token embeddings")
    if flow.config.predictor != "weighted":
        raise UserError(f"{name} predicts embeddings directly: a teacher must have weights over the token table")
    return flow.requires_grad_(False)


def with_settings(model: ConvergeFlowModel, config: RunConfig) -> Teacher:
    """The teacher of a run, as it is to be sampled."""
    assert config.distill is not None
    settings = settings_of(config.distill.sampling, model.schedule, model.config.preset)
    if settings.self_condition == "previous" or settings.freeze is not None or settings.solver != "euler":
        raise UserError("distill.sampling: a teacher is recursive or has no condition, with euler and without freezing")
    return Teacher(model, settings)


def build_student(config: RunConfig, vocabulary: int) -> Student:
    """A student at the start of its run: a copy of its teacher."""
    assert config.distill is not None
    chosen = config.distill
    if chosen.weights not in (None, found := zoo.weights_hash(zoo.locate(chosen.teacher))):
        raise UserError(
            f"the teacher {chosen.teacher} has other weights ({found}) than when this run began: start a new one"
        )
    model = load_teacher(chosen.teacher)
    if vocabulary != model.config.vocabulary:
        raise UserError(
            f"the text has {vocabulary} tokens, the teacher {model.config.vocabulary}: name its own with corpus.name="
        )
    return Student(config.model.complete(vocabulary, config.corpus.length), with_settings(model, config), chosen.calls)
