"""What a training run is: one typed, frozen record, read from a preset and changed by `key.sub=value`.

Every value has an origin (default, size, preset or command line) that can be printed. An unknown key or an impossible
value is refused with one line that names the key and the nearest known name; nothing is accepted in silence.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from convergeflow.errors import UserError, unknown_name
from convergeflow.model import SIZES

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A part of the configuration: immutable, and strict about its names."""

    # Infinities and NaN are never meant: YAML reads `.inf` and `nan` without a word.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CorpusConfig(Section):
    """The text and how it is cut."""

    name: str = "stories"
    """A corpus of the package, `hf:DATASET`, or a folder made by `convergeflow prepare`."""
    paths: tuple[str, ...] = ()
    """The user's own files (txt, jsonl, parquet); they take the place of a named corpus."""
    tokenizer: str | None = None
    """`word`, `bpe`, `byte`, `gpt2` or a folder; none: what suits the corpus."""
    vocabulary: PositiveInt | None = None
    """Number of tokens; none: what the tokenizer gives."""
    length: PositiveInt = 64
    """Tokens in a block."""
    blocks: PositiveInt | None = None
    """Training blocks of the generated `stories`; none: the corpus's default. Texts have as many as they have."""
    heldout_blocks: PositiveInt | None = None


class ScheduleConfig(Section):
    """The noise schedule; for `gumbel` gamma(q) = loc - scale log(-log q), cut at `cutoff` on both sides."""

    kind: Literal["gumbel", "linear", "cosine"] = "gumbel"
    loc: float | None = None
    """None: 4.723 - ln(768 / width), LangFlow's start carried over to another width."""
    scale: PositiveFloat = 0.852
    cutoff: Annotated[float, Field(gt=0.0, lt=0.5)] = 1e-5
    entropy: PositiveFloat | None = None
    """Height h of the entropy curve that the schedule is fitted to; none: the corpus's unigram entropy in nats."""


class ModelConfig(Section):
    """The network."""

    method: str = "convergeflow"
    size: str | None = "small"
    width: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    condition_width: PositiveInt = 128
    dropout: Decay = 0.0
    predictor: Literal["weighted", "direct"] = "weighted"
    schedule: ScheduleConfig = ScheduleConfig()
    gate_init: float = 0.0
    """Start value of the residual gates; 0 is LangFlow's, an opened gate lets attention learn sooner."""
    context_free_input: bool = False
    """Read alpha x_t and the prediction at hand: the earlier one, else the posterior mean under the unigram prior."""
    neighbours: NonNegativeInt = 0
    """Mix the inputs of this many preceding positions into each position's; 0 is the paper's network."""
    head_init: NonNegativeFloat = 0.0
    """Start the head at this multiple of the token table; 0 is LangFlow's."""
    pool_evidence: bool = False
    """Let a position add the evidence of other positions that hold the same word."""
    block_length: PositiveInt | None = None
    """Denoise blocks of up to this many tokens, each after the clean tokens before it; none: the paper's whole
    sequence."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings that only one method has, handed to its builder, which refuses unknown ones."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_size(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        size = values.get("size", "small")
        if size is None:
            return values
        if size not in SIZES:
            raise unknown_name("size", str(size), SIZES)
        return {**SIZES[size], **values}

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if (self.width // self.heads) % 2:
            raise ValueError(f"width / heads = {self.width // self.heads} must be even for the rotary embedding")
        return self

    @model_serializer(mode="wrap")
    def _without_blocks(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """No blocks are left out: a configuration written before there were any says the same."""
        values: dict[str, Any] = write(self)
        return {name: value for name, value in values.items() if (name, value) != ("block_length", None)}

    def start_loc(self) -> float:
        """The Gumbel location to start from."""
        return 4.723 - math.log(768 / self.width) if self.schedule.loc is None else self.schedule.loc


class StageConfig(Section):
    """One objective for a number of steps; a recipe is a list of stages."""

    name: str
    objective: Literal["ce", "mse"]
    steps: PositiveInt
    lr: PositiveFloat
    matrix_lr: PositiveFloat | None = None
    """Rate of the matrices that Muon moves; none: 20 x lr."""
    table_lr: PositiveFloat | None = None
    """Rate of the token table; none: lr. A fast table pulls frequent words together until no kernel tells them."""
    schedule_lr: PositiveFloat | None = None
    """Rate of the noise schedule's own parameters; none: lr."""
    warmup: NonNegativeInt = 0
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    lr_floor: Share = 0.0
    """Share of the rate that is left at the end of `cosine` and `linear`."""
    learn_table: bool = False
    learn_schedule: bool = False
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
    """Largest norm of the gradient; none: no clipping."""
    momentum: Decay = 0.95
    """Muon's momentum."""


class EmaConfig(Section):
    """Average of the weights: decay min(decay, (1 + n) / (10 + n)) after n updates, or constant."""

    decay: Decay = 0.9999
    warmup: bool = True


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
    seed: NonNegativeInt = 0
    device: str = "auto"
    """A name that `device.choose_device` knows; `auto` takes the fastest device present."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several processes share the work; one process ignores it."""
    compile: bool = False
    recompute: bool = False
    """Compute each block again in the backward pass instead of keeping its activations: less memory, more time."""
    checkpoint_every: PositiveInt = 500
    keep: PositiveInt = 2
    """Checkpoints kept; older ones are removed after a newer one is safely written."""
    log_every: PositiveInt = 1
    evaluate_every: NonNegativeInt = 250
    """Steps between evaluations on held-out blocks; 0: only at the end."""
    evaluate_blocks: PositiveInt = 128
    sample_every: NonNegativeInt = 0
    """Steps between sample texts in the journal; 0: only at the end."""
    sample_nfe: PositiveInt = 32
    tensorboard: bool = False

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        if self.batch % self.accumulate:
            raise ValueError(f"batch {self.batch} is not a multiple of accumulate {self.accumulate}")
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


# ------------------------------------------------------------------------------------------ presets and overrides


def presets() -> list[str]:
    """Names of the presets in the package."""
    folder = resources.files("convergeflow") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def read_preset(name: str) -> dict[str, Any]:
    """The raw values of a preset by name, or of the user's own YAML file."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise UserError(f"no configuration file {name!r}")
        text = path.read_text(encoding="utf-8")
    elif name in presets():
        text = (resources.files("convergeflow") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        raise unknown_name("preset", name, presets())
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{name} does not hold keys and values")
    return values


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """`stages.0.lr=1e-3` -> (("stages", "0", "lr"), value); the value is read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"{text!r} is not key=value (example: stages.0.steps=100)")
    try:
        return tuple(key.strip().split(".")), yaml.safe_load(value)
    except yaml.YAMLError:
        raise UserError(f"the value of {key.strip()} is not readable: {value!r}") from None


def _put(values: Any, path: Sequence[str], value: Any, done: tuple[str, ...] = ()) -> None:
    """Write `value` at `path` inside nested dicts and lists; a list entry goes by index or by its `name`."""
    where = ".".join((*done, path[0]))
    if isinstance(values, list):
        named = [str(entry.get("name")) if isinstance(entry, dict) else "" for entry in values]
        index = named.index(path[0]) if path[0] in named else int(path[0]) if path[0].isdigit() else -1
        if not 0 <= index < len(values):
            known = ", ".join(f"{number} ({name})" for number, name in enumerate(named))
            raise UserError(f"{where}: no such entry in {'.'.join(done)} (known: {known})")
        if len(path) == 1:
            values[index] = value
        else:
            _put(values[index], path[1:], value, (*done, path[0]))
    elif len(path) == 1:
        values[path[0]] = value
    else:
        inner = values.setdefault(path[0], {})
        if not isinstance(inner, dict | list):
            raise UserError(f"{where} is a single value and has no key {path[1]!r}")
        _put(inner, path[1:], value, (*done, path[0]))


def _fields_at(location: Sequence[str | int]) -> list[str]:
    """The known keys of the section that a validation error's location lies in."""
    section: type[Section] | None = RunConfig
    for key in location:
        if isinstance(key, int):
            continue
        field = None if section is None else section.model_fields.get(key)
        if field is None:
            return []
        candidates = [field.annotation, *get_args(field.annotation)]
        section = next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), None)
    return [] if section is None else list(section.model_fields)


def _one_line(error: ValidationError) -> UserError:
    """The first finding of pydantic, as one line that names the key and the fix."""
    finding = error.errors()[0]
    location = finding["loc"]
    path = ".".join(map(str, location))
    if finding["type"] == "extra_forbidden":
        known = _fields_at(location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {'.'.join([*map(str, location[:-1]), close[0]])!r}? " if close else ""
        return UserError(f"unknown key {path!r}: {hint}(known here: {', '.join(sorted(known)) or 'none'})")
    if finding["type"] == "missing":
        return UserError(f"{path} is missing: give it in the preset or as {path}=VALUE")
    if finding["type"] == "value_error":
        return UserError(f"{path + ': ' if path else ''}{finding['ctx']['error']}")
    reason = finding["msg"].replace("Input should be", "must be")
    return UserError(f"{path}: {reason} (got {finding['input']!r})")


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """A configuration from plain values, checked."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise _one_line(error) from None


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Plain values with `key.sub=value` overrides written into them."""
    for text in overrides:
        path, value = parse_override(text)
        _put(values, path, value)
    return values


def resolve(preset: str, overrides: Sequence[str] = ()) -> RunConfig:
    """A preset (or a YAML file) with overrides applied."""
    return from_dict(apply_overrides(read_preset(preset), overrides))


def _leaves(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    entries: Any = None
    if isinstance(values, Mapping) and values:
        entries = values.items()
    elif isinstance(values, list) and values and isinstance(values[0], Mapping):
        entries = enumerate(values)
    if entries is None:
        yield path, values
        return
    for key, value in entries:
        yield from _leaves(value, (*path, str(key)))


def origins(preset: str, overrides: Sequence[str] = ()) -> list[tuple[str, Any, str]]:
    """(key, value, where the value comes from) for every value of the resolved configuration."""
    raw = read_preset(preset)
    from_preset = {path for path, _ in _leaves(raw)}
    from_command: set[tuple[str, ...]] = set()
    for text in overrides:
        before = dict(_leaves(raw))
        path, value = parse_override(text)
        _put(raw, path, value)
        # A stage may have been addressed by its name; the origin is kept under its number.
        parts = list(path)
        if parts[0] == "stages" and len(parts) > 1 and not parts[1].isdigit():
            parts[1] = str([stage.get("name") for stage in raw["stages"]].index(parts[1]))
        prefix = tuple(parts)
        after = {where for where, _ in _leaves(raw)}
        from_command |= {where for where in after if where[: len(prefix)] == prefix or where not in before}
    config = from_dict(raw)
    found: list[tuple[str, Any, str]] = []
    for path, value in _leaves(config.to_dict()):
        if path in from_command:
            origin = "command line"
        elif path in from_preset:
            origin = f"preset {preset}"
        elif path[0] == "model" and len(path) == 2 and path[1] in SIZES["test"] and config.model.size:
            origin = f"size {config.model.size}"
        else:
            origin = "default"
        found.append((".".join(path), value, origin))
    return found
