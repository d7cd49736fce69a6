"""What a training run is: one typed, frozen record, read from a recipe and changed by `key.sub=value`.

Every value has an origin (default, size, recipe, corpus or command line) that can be printed. An unknown key or an
impossible value is refused with one line that names the key and the nearest known name; nothing is accepted in silence.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

from convergeflow.data.corpus import Corpus
from convergeflow.errors import UserError, unknown_name
from convergeflow.flow.schedule import SCHEDULES
from convergeflow.model import SIZES
from convergeflow.systems import METHODS, OURS
from convergeflow.systems.config import SystemConfig
from convergeflow.training.recipes import leaves, parse_override, put, read_recipe

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A part of the configuration: immutable, and strict about its names."""

    # Infinities and NaN are never meant: YAML reads `.inf` and `nan` without a word.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    _later: ClassVar[tuple[str, ...]] = ()
    """Keys that came after results were kept: written only where they are set, so that those results are found."""

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        unset = {name for name in self._later if getattr(self, name) == type(self).model_fields[name].default}
        return {name: value for name, value in write(self).items() if name not in unset}


class CorpusConfig(Section):
    """The text and how it is cut."""

    name: str = "stories"
    """A corpus of the package, `hf:NAME@REVISION`, or a folder made by `convergeflow prepare`."""
    paths: tuple[str, ...] = ()
    """The user's own files (txt, jsonl, parquet, or train.bin and val.bin); they take the place of a named corpus."""
    tokenizer: str | None = None
    """`word`, `word-byte`, `bpe`, `byte`, `gpt2` or a folder; if absent, what suits the corpus."""
    vocabulary: PositiveInt | None = None
    """Number of tokens; if absent, what the tokenizer gives."""
    length: PositiveInt = 64
    """Tokens in a sequence."""
    blocks: PositiveInt | None = None
    """Training sequences of the generated `stories`, if not the usual number; other texts have as many as they have."""
    heldout_blocks: PositiveInt | None = None
    windows: Literal["fixed", "random"] = "fixed"
    """`fixed`: a row is one of the sequences. `random`: it begins at any token (nanoGPT, the published code)."""

    _later = ("windows",)


class ModelConfig(Section):
    """The system to train: a method, and the fields of that method's own configuration (`systems/`).

    In a recipe they stand side by side: `model: {method: elf, size: small, depth: 6, latent: 32}`. A named `size` fills
    in width, depth and heads where they are not given. The schedule has one more key here, `entropy`. What belongs to
    ConvergeFlow's network alone is left out for other methods, so that one recipe serves them all.
    """

    method: str = OURS
    size: str | None = "small"
    entropy: PositiveFloat | None = None
    """Height h of the entropy curve that the schedule is fitted to; None means the corpus's unigram entropy in nats."""
    system: InstanceOf[SystemConfig]
    """The method's configuration; vocabulary and length are the corpus's and not known yet."""

    @model_validator(mode="before")
    @classmethod
    def _sort(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        taken: dict[str, Any] = {"method": str, "size": str | None, "schedule": Mapping | None, "options": Mapping}
        for name, wanted in taken.items():
            if name in values and not isinstance(values[name], wanted):
                raise ValueError(f"{name} cannot be {values[name]!r:.50}")
        if not all(isinstance(name, str) for name in values):
            raise ValueError("its keys must be names")
        values = {**values, **values.get("options", {})}  # older files have a method's own fields under `options`
        values.pop("options", None)
        method, size = values.pop("method", OURS), values.pop("size", "small")
        if size is not None and size not in SIZES:
            raise unknown_name("size", str(size), SIZES)
        kind = METHODS[method].config_class
        schedule = dict(values.pop("schedule", None) or {})
        chosen: dict[str, Any] = {"method": method, "size": size}
        if "entropy" in schedule:
            chosen["entropy"] = schedule.pop("entropy")
        known = kind.options()
        for name in values.keys() - known:
            if name not in METHODS[OURS].config_class.options():
                raise unknown_name("key", name, [*known, "method", "size"], within="model.")
        if "schedule" in known:
            values["schedule"] = _checked_schedule(schedule)
        # Recipes train without dropout unless they say so; 0.1, the published networks', is the default of a model.
        shape = {"dropout": 0.0, **({} if size is None else SIZES[size])}
        shape |= {name: value for name, value in values.items() if name in known}
        for name in SIZES["small"].keys() - shape.keys():
            raise ValueError(f"{name} is missing: give it or a size")
        return {**chosen, "system": TypeAdapter(kind).validate_python(shape)}

    @model_serializer
    def _side_by_side(self) -> dict[str, Any]:
        values = self.system.to_dict()
        own = {name: values[name] for name in self.system.options()}
        if "schedule" in own:
            own["schedule"] = {**own["schedule"], "entropy": self.entropy}
        return {"method": self.method, "size": self.size, **own}

    def complete(self, vocabulary: int, length: int) -> SystemConfig:
        """The configuration of a model for a corpus."""
        return replace(self.system, vocabulary=vocabulary, length=length)


def _checked_schedule(values: Mapping[str, Any]) -> dict[str, Any]:
    """The kind and the values of a schedule, with names and types checked against its dataclass."""
    given = {name: value for name, value in values.items() if value is not None}
    name = given.pop("kind", "gumbel")
    if not isinstance(name, str):
        raise ValueError(f"schedule.kind cannot be {name!r:.50}")
    kind = SCHEDULES[name]
    allowed = list(inspect.signature(kind).parameters)
    for key in given.keys() - set(allowed):
        raise unknown_name("key", key, [*allowed, "kind", "entropy"], within="model.schedule.")
    checked = TypeAdapter(kind).validate_python(given)
    return {"kind": name, **{key: getattr(checked, key) for key in given}}


class StageConfig(Section):
    """One objective for a number of steps; a recipe is a list of stages."""

    name: str
    objective: Literal["ce", "mse"]
    steps: PositiveInt
    lr: PositiveFloat
    matrix_lr: PositiveFloat | None = None
    """Rate of the matrices that Muon moves; if absent, 20 x lr."""
    table_lr: PositiveFloat | None = None
    """Rate of the token table; if absent, lr. A fast table pulls frequent words together until no kernel tells them."""
    schedule_lr: PositiveFloat | None = None
    """Rate of the noise schedule's own parameters; if absent, lr."""
    warmup: NonNegativeInt = 0
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    lr_floor: Share = 0.0
    """Share of the rate that is left at the end of `cosine` and `linear`."""
    learn_table: bool = False
    learn_schedule: bool = False
    """Move the noise schedule: by its own fit under ce; under mse by the loss itself, as the published code does."""
    self_condition: Share = 0.25
    """Probability per example of a condition from a first pass."""
    position_noise: Share = 0.0
    """Share of the sequences with an independent noise level per position."""
    clean_context: Share = 0.0
    """Share of the sequences whose every word is predicted from pure noise and the clean words before it: teaches
    attention to copy."""
    keep_moments: bool = False
    """Carry the optimizer's moments over from the stage before (to study a switch of objective alone)."""
    from_average: bool = False
    """Start this stage from the averaged weights of the stage before."""

    @model_validator(mode="after")
    def _warmup_fits(self) -> StageConfig:
        if self.warmup > self.steps:
            raise ValueError(f"warmup {self.warmup} is longer than the stage's {self.steps} steps")
        return self

    def rate(self, step: int) -> float:
        """Share of the peak learning rate for step 0 .. steps - 1 of this stage."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.lr_schedule == "constant":
            return 1.0
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        falling = 0.5 * (1.0 + math.cos(math.pi * progress)) if self.lr_schedule == "cosine" else 1.0 - progress
        return self.lr_floor + (1.0 - self.lr_floor) * falling


class OptimizerConfig(Section):
    """AdamW, or Muon for the trunk's matrices and AdamW for the rest."""

    name: Literal["adamw", "muon-fp32"] = "adamw"
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    weight_decay: NonNegativeFloat = 0.0
    clip: PositiveFloat | None = None
    """Largest norm of the gradient; if absent, gradients are not clipped."""
    momentum: Decay = 0.95
    """Muon's momentum."""


class EmaConfig(Section):
    """Average of the weights: decay min(decay, (1 + n) / (10 + n)) after n updates, or constant."""

    decay: Decay = 0.9999
    warmup: bool = True


class DistillConfig(Section):
    """Whom a student learns from, and how many calls it will make (`convergeflow distill`)."""

    teacher: str
    """A shipped model, a checkpoint folder or a training run."""
    weights: str | None = None
    """Hash of the teacher's weights; the command fills it in, and a run goes on with the same teacher only."""
    sampling: dict[str, str | float | int | bool] = {}
    """How the teacher is sampled: `preset` and the options of `generate`."""
    calls: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 2, 4, 8)
    """Network calls of the student's walks; a row takes one of them, and one that is named twice is taken twice as
    often."""


class RunConfig(Section):
    """Everything that decides a training run."""

    corpus: CorpusConfig
    model: ModelConfig
    stages: Annotated[tuple[StageConfig, ...], Field(min_length=1)]
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: PositiveInt
    """Sequences per step, over all processes."""
    accumulate: PositiveInt = 1
    """Parts into which each process cuts its share of the batch."""
    ema: EmaConfig = EmaConfig()
    table: Literal["random", "contexts"] = "random"
    """How the token table starts: at random, or turned towards tokens that stand in the same places of the text."""
    seed: NonNegativeInt = 0
    device: str = "auto"
    """A name that `device.choose_device` knows; `auto` takes the fastest device present."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of a step's products; `auto` is the device's own. bf16 is fast on CPUs with instructions for it, and on GPUs."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several processes share the work; one process ignores it."""
    compile: bool | Literal["auto"] = False
    """Compile the trunk; `auto` does it on CUDA, where it pays."""
    recompute: bool = False
    """Compute each layer again in the backward pass instead of keeping its activations: less memory, more time."""
    checkpoint_every: PositiveInt = 500
    keep: PositiveInt = 2
    """Checkpoints kept; older ones are removed after a newer one is safely written."""
    keep_every: NonNegativeInt = 0
    """Checkpoints of every so many steps are kept for good, beside the newest; 0 means none."""
    log_every: PositiveInt = 1
    evaluate_every: NonNegativeInt = 250
    """Steps between evaluations on held-out sequences; 0 means only at the end."""
    evaluate_blocks: PositiveInt = 128
    sample_every: NonNegativeInt = 0
    """Steps between sample texts in the journal; 0 means only at the end."""
    sample_nfe: PositiveInt = 32
    tensorboard: bool = False
    distill: DistillConfig | None = None
    """A teacher, for `convergeflow distill`; None trains on text."""

    _later = ("keep_every", "table", "distill")

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        if self.batch % self.accumulate:
            raise ValueError(f"batch {self.batch} is not a multiple of accumulate {self.accumulate}")
        if self.keep_every % self.checkpoint_every:
            raise ValueError(
                f"keep_every {self.keep_every} is not a multiple of checkpoint_every {self.checkpoint_every}: no "
                "checkpoint would be there to keep"
            )
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stage names must differ, got {', '.join(names)}")
        return self

    @property
    def total_steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def stage_at(self, step: int) -> tuple[int, int]:
        """The stage that step `step` (from 0) belongs to, and the step within it."""
        for index, stage in enumerate(self.stages):
            if step < stage.steps:
                return index, step
            step -= stage.steps
        raise IndexError("step is past the last stage")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` gives the same configuration back."""
        return self.model_dump(mode="json")


SECTIONS: dict[str, type[Section]] = {
    "corpus": CorpusConfig,
    "stages": StageConfig,
    "optimizer": OptimizerConfig,
    "ema": EmaConfig,
    "distill": DistillConfig,
}
"""The parts whose keys pydantic checks; `ModelConfig` checks its own."""


def _one_line(error: ValidationError) -> UserError:
    """The first finding of pydantic, as one line that names the key and the fix."""
    finding = error.errors()[0]
    location = finding["loc"]
    path = ".".join(map(str, location))
    if finding["type"] == "extra_forbidden":
        section: type[Section] = SECTIONS[str(location[0])] if len(location) > 1 else RunConfig
        within = path[: -len(str(location[-1]))]
        return unknown_name("key", str(location[-1]), section.model_fields, within)
    if finding["type"] == "missing":
        return UserError(f"{path} is missing: give it in the recipe or as {path}=VALUE")
    if finding["type"] == "value_error":
        reason = str(finding["ctx"]["error"])
        return UserError(reason if not path or reason.startswith("unknown key") else f"{path}: {reason}")
    reason = finding["msg"].replace("Input should be", "must be")
    return UserError(f"{path}: {reason} (got {finding['input']!r})")


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """A configuration from plain values, checked."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise _one_line(error) from None


def renewed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration from an earlier version as they are written today; results are kept by them."""
    return from_dict(values).to_dict()


Origins = dict[tuple[str, ...], str]
"""Path of a value -> where it comes from."""


def scaled(config: RunConfig, steps: int) -> RunConfig:
    """The same run in `steps` steps: every stage with its warm-up in proportion, and at least one step of each."""
    if steps < len(config.stages):
        raise UserError(f"{len(config.stages)} stages need at least {len(config.stages)} steps, not {steps}")
    return refitted(config, 0, steps)


def refitted(config: RunConfig, step: int, left: int) -> RunConfig:
    """The same run with `left` steps behind step `step`: what was left of every stage in proportion, one at least."""
    index, local = config.stage_at(step)
    rest = [stage.steps - (local if number == index else 0) for number, stage in enumerate(config.stages)][index:]
    left = max(left, len(rest))
    ratio = left / sum(rest)
    counts = [max(1, int(number * ratio)) for number in rest]
    # What rounding left over goes to the stages that lost most by it; what it gave too much, the longest one gives.
    for place in sorted(range(len(rest)), key=lambda place: counts[place] - rest[place] * ratio):
        if sum(counts) < left:
            counts[place] += 1
    counts[counts.index(max(counts))] -= sum(counts) - left
    values = config.to_dict()
    for number, (stage, count) in enumerate(zip(values["stages"][index:], counts, strict=True)):
        done = local if number == 0 else 0
        # A warm-up that is behind stays as it was: the rate is that of the step.
        warmup = stage["warmup"] if 0 < stage["warmup"] <= done else round(stage["warmup"] * ratio)
        stage |= {"steps": done + count, "warmup": min(done + count, warmup)}
    return from_dict(values)


def mark_scaled(config: RunConfig, given: Origins) -> Origins:
    """The origins of a configuration whose stages were scaled."""
    fitted = [("stages", str(number), key) for number in range(len(config.stages)) for key in ("steps", "warmup")]
    return given | dict.fromkeys(fitted, "scaled")


def assembled(values: dict[str, Any], overrides: Sequence[str], said: str) -> tuple[dict[str, Any], Origins]:
    """Values with overrides written into them, and where each value comes from: `said`, the corpus, the command line.

    What the values say about a corpus of their own gives way to a corpus that an override names.
    """
    given: Origins = dict.fromkeys((path for path, _ in leaves(values)), said)
    changes = [parse_override(text) for text in overrides]
    for path, value in changes:
        if path in (("corpus", "name"), ("corpus", "paths")):
            given |= dict.fromkeys(_give_way(values, path[1], value), "the corpus")
    for path, value in changes:
        changed = put(values, path, value)
        given |= {path: "command line" for path, _ in leaves(values) if path[: len(changed)] == changed}
    return values, given


def _give_way(values: dict[str, Any], key: str, named: Any) -> list[tuple[str, ...]]:
    """Make room in a recipe's `corpus` for another one; a prepared corpus says its own length and vocabulary."""
    corpus = values.setdefault("corpus", {})
    if not isinstance(corpus, dict):
        return []  # refused later, by name
    if key == "name":
        corpus.pop("paths", None)
    single = named[0] if isinstance(named, list) and len(named) == 1 else named
    if single == "stories":
        corpus.pop("tokenizer", None)
        corpus.pop("vocabulary", None)
    if not isinstance(single, str) or not (Path(single) / "manifest.json").is_file():
        return []
    for decided in ("tokenizer", "blocks", "heldout_blocks"):
        corpus.pop(decided, None)
    prepared = Corpus.open(single)
    corpus |= {"vocabulary": prepared.vocabulary, "length": prepared.length}
    return [("corpus", "vocabulary"), ("corpus", "length")]


def resolve(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """A recipe (or a YAML file) with overrides applied."""
    return from_dict(assembled(read_recipe(recipe), overrides, f"recipe {recipe}")[0])


def origins(config: RunConfig, given: Origins) -> list[tuple[str, Any, str]]:
    """(key, value, where the value comes from) for every value of a configuration; what was not given is a default."""

    def origin(path: tuple[str, ...]) -> str:
        of_size = config.model.size is not None and path[0] == "model" and path[1] in SIZES["test"]
        return given.get(path, f"size {config.model.size}" if of_size else "default")

    return [(".".join(path), value, origin(path)) for path, value in leaves(config.to_dict())]
