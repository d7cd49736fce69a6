"""The one contract that every system of this package follows, the records that pass between rooms, and checkpoints.

ConvergeFlow and every rival are a `LanguageModel`, so that training, evaluation and comparison are loops without a
branch on a name. A checkpoint folder holds config.json, model.safetensors and, if there is one, the tokenizer's files.
Loading is strict: a weight that is missing, unexpected or mis-shaped is an error that names it, and files in half
precision are computed in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from convergeflow.data.provenance import FILE as TRAINED_ON
from convergeflow.data.provenance import TrainedOn, recalled
from convergeflow.data.tokenizer import Tokenizer
from convergeflow.device import Precision, dtype_named, precision_of, state_dtype_of, too_short, trunk_autocast
from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.files import write_json
from convergeflow.flow.schedule import Schedule
from convergeflow.kinds import whole
from convergeflow.objective.losses import Loss
from convergeflow.plugins import Registry
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.sampling.integration import default_batch
from convergeflow.sampling.settings import Settings
from convergeflow.systems import class_of_type
from convergeflow.systems.config import CONFIG_FILE, SystemConfig, read_config
from convergeflow.systems.finite import check_weights
from convergeflow.systems.hub import hub_folder

if TYPE_CHECKING:
    from convergeflow.systems.convergeflow import ConvergeFlowModel

WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "card.md"
MOST_SAMPLES = 1_000_000
MOST_CALLS = 100_000
"""Network calls per sample; the paper makes 1024 at most."""


@dataclass(frozen=True)
class Samples:
    """Generated sequences and how they were made."""

    ids: Tensor
    """Token ids, [n, length]."""
    seeds: list[int]
    """The seed of each sample; a sample depends on its own seed alone."""
    nfe: int
    """Network calls per sample, counted while sampling, not computed from the settings."""
    settings: dict[str, Any]
    """Everything needed to make them again, as JSON values."""
    texts: list[str] | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Per-sample tensors by name, such as final logits or the agreement of the token rules."""
    marked: list[str] | None = None
    """The texts of an infill, with what fills its gaps in [brackets]."""


@dataclass(frozen=True)
class Bound:
    """An upper bound on the negative log-likelihood, in nats per token."""

    nats_per_token: float
    standard_error: float
    draws: int
    kind: str
    tokens: int
    nats: tuple[float, ...] = ()
    """Of each sequence or text, over all its tokens."""

    @classmethod
    def of(cls, rows: Tensor, draws: int, kind: str, tokens: int) -> Bound:
        """From one number per sequence, with the standard error over sequences."""
        error = float(rows.std() / len(rows) ** 0.5) if len(rows) > 1 else float("nan")
        nats = tuple((rows.double() * (tokens / len(rows))).tolist())
        return cls(float(rows.mean()), error, draws, kind, tokens, nats)


def streams(seed: int, rows: int) -> RowDraws:
    """The noise of a bound: a stream per row."""
    return RowDraws([derive_seed(seed, "bound", row) for row in range(rows)])


LATER: Registry[Callable[..., Any]] = Registry(
    "way on from a model",
    "ways",
    {"finetune": "convergeflow.training.finetune:finetune", "push_to_hub": "convergeflow.interop.hub:push_to_hub"},
)
"""What a model can do that belongs to rooms behind this one."""


class Stage(Protocol):
    """What a system reads of a stage of a recipe."""

    objective: Literal["ce", "mse"]
    steps: int
    self_condition: float
    position_noise: float
    clean_context: float
    learn_table: bool
    learn_schedule: bool


MakeSettings = Callable[[Schedule, str | None], Settings]
"""The settings that a user asked for, given a model's schedule and the preset that it prefers."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Named tensors as safetensors."""
    whole = {name: tensor.detach().contiguous() for name, tensor in sorted(tensors.items())}
    # Serialised here and written by Python, so that a full disk is an OSError with its number.
    path.write_bytes(save(whole, metadata={"format": "pt"}))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Named tensors of a safetensors file, on the CPU; a damaged file is refused by name."""
    try:
        return load_file(path)
    except SafetensorError as damage:
        raise UserError(f"{path} is damaged ({damage}): copy or train it again") from None


def check_sizes(config: SystemConfig, weights: Mapping[str, Tensor], source: object) -> None:
    """Refuse sizes that belong to a far larger network than the weights, before it is built."""
    if config.least_parameters() > 2 * sum(tensor.numel() for tensor in weights.values()):
        raise UserError(f"{source}: its sizes do not belong to these weights, which are far fewer")


def misfits(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """How given tensors differ in name or shape from those that a model has, on one line; empty if they fit."""
    shapes = {name: (tuple(given[name].shape), tuple(own[name].shape)) for name in sorted(own.keys() & given.keys())}
    found = {
        "missing": sorted(own.keys() - given.keys()),
        "unexpected": sorted(given.keys() - own.keys()),
        "mis-shaped": [f"{name} is {there}, not {here}" for name, (there, here) in shapes.items() if there != here],
    }
    return "; ".join(listing(kind, names) for kind, names in found.items() if names)


def listing(kind: str, names: Sequence[str], most: int = 8) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{kind}: {', '.join(names[:most])}{more}"


class LanguageModel(nn.Module):
    """What training, generation and evaluation need of a system; subclasses give the loss and the sampler."""

    method: str
    """The name in `METHODS`."""
    config_class: ClassVar[type[SystemConfig]]
    network: nn.Module
    """The module whose calls are counted as NFE."""
    bound_kind: str | None = None
    """What `bound` computes; None means that the method has no bound."""
    controls: Mapping[str, Any] = MappingProxyType({})
    """The method's own sampling controls (keywords of `sample`) with their defaults."""
    frontier: Sequence[Mapping[str, Any]] = ({},)
    """Values of the controls that trade quality for diversity; the first is the method's default."""

    @classmethod
    def model_type(cls) -> str:
        """The system's name in config.json."""
        return f"convergeflow-{cls.method}"

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.tokenizer: Tokenizer | None = None
        """Of the folder that the model came from, if it holds one; without it samples are ids alone."""
        self.card: str | None = None
        """What is known of the training, as a page of Markdown."""
        self.trained_on: TrainedOn | None = None
        """What the folder says of its training text; real text that contradicts it must not judge this model."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def precision(self) -> Precision:
        """The formats that this model is computed in."""
        return precision_of(self.device, next(self.parameters()).dtype)

    @property
    def table(self) -> nn.Module | None:
        """The module of the network that holds a row per token, if there is one."""
        return dict(self.network.named_children()).get("embedding")

    def num_parameters_without_table(self) -> int:
        """All parameters but the token table: the paper's "130M" at base size."""
        table = 0 if self.table is None else sum(parameter.numel() for parameter in self.table.parameters())
        return sum(parameter.numel() for parameter in self.parameters()) - table

    laws = 1
    """Float32 copies of a law over the vocabulary that a step of the sampler holds at its peak on an accelerator."""

    def batch_size(self, length: int) -> int:
        """How many sequences of `length` tokens go through the network at once, if nobody says."""
        copies = 1 if self.device.type == "cpu" else self.laws
        return default_batch(length, self.config.vocabulary, self.device, copies)

    def as_flow(self) -> ConvergeFlowModel | None:
        """This model, if it is a flow that takes `settings`; None for every other system."""
        return None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Dropout off, and the trunk in its device's format, for the time of a `with` block."""
        was_training = self.training
        self.eval()
        try:
            with trunk_autocast(self.device):
                yield
        finally:
            self.train(was_training)

    def set_unigram(self, counts: Tensor, entropy: float | None = None) -> None:
        """Hear the token counts of the training text; most systems learn the frequencies by themselves."""

    def enter_stage(self, stage: Stage) -> None:
        """Set the objective and which parameters are trained for a stage of the recipe: by default all of them."""
        self.requires_grad_(True)

    def loss(self, tokens: Tensor, *, times: Tensor, draws: RowDraws) -> Loss:
        """The loss of `tokens` [B, L]; `times` [B] are uniforms in (0, 1), stratified over the global batch."""
        raise NotImplementedError

    def monitor(self, tokens: Tensor, *, draws: RowDraws) -> dict[str, float]:
        """Validation numbers at fixed noise, comparable across training steps."""
        raise NotImplementedError

    def bound(
        self, text: Tensor | str | Sequence[str], *, seed: int = 0, draws: RowDraws | None = None, **how: Any
    ) -> Bound:
        """An upper bound on -log p of texts, or of token ids [n, L], in nats per token.

        A text longer than the model's sequences is cut into such, and each is bounded for itself. The noise comes from
        `seed`, or from `draws` with a stream per row of ids. `repeats` is the number of noise levels a row.
        """
        if self.bound_kind is None:
            raise UserError(f"{self.method} has no likelihood bound")
        if "repeats" in how:
            how["repeats"] = whole("repeats", how["repeats"])
        from convergeflow.systems.texts import bound_of_texts, checked_ids

        if hasattr(text, "shape"):  # of a tensor, or of numpy's array
            ids = checked_ids(torch.as_tensor(text), int(self.config.vocabulary))
            return self.bound_of_ids(ids, draws=draws or streams(seed, len(ids)), **how)
        return bound_of_texts(self, [text] if isinstance(text, str) else text, whole("seed", seed), **how)

    def bound_of_ids(self, tokens: Tensor, *, draws: RowDraws, **how: Any) -> Bound:
        """The bound of `tokens` [n, L], where a system has a `bound_kind`; `how` has `repeats` and `progress`."""
        raise NotImplementedError

    def sampling_arguments(
        self, given: Mapping[str, Any], controls: Mapping[str, Any], settings: MakeSettings, length: int | None = None
    ) -> dict[str, Any]:
        """Keywords for `sample`, from the options that a user gave by name and the method's own controls.

        `settings` makes ConvergeFlow's settings of the same options; a method without them refuses options that it does
        not know. With a `length`, the budget is raised to what a text of that length needs, unless `nfe` was given.
        """
        own, unknown = dict(controls), dict(given)
        nfe = unknown.pop("nfe", 64)
        if "temperature" in own and "temperature" in unknown:
            raise UserError("`temperature` is given twice, as an option and in `set`: give one of them")
        if "temperature" in self.controls and "temperature" in unknown:
            own["temperature"] = unknown.pop("temperature")
        if unknown:
            known = ", ".join(self.controls) or "none"
            raise UserError(
                f"{self.method} does not know `{next(iter(unknown))}`; its own controls (`set`) are {known}"
            )
        return {"nfe": nfe, **own}

    def sample(self, num: int, length: int, *, seeds: Sequence[int], nfe: int = 64, **how: Any) -> Samples:
        """Generate `num` sequences of `length` tokens with `nfe` network calls each, one seed per sequence.

        `how` are the method's controls, and for all methods `observe`, `clamp` (known tokens) and `batch`.
        """
        raise NotImplementedError

    def generate(
        self,
        num: int = 1,
        *,
        prompt: str | None = None,
        infill: str | None = None,
        gap: int = 4,
        length: int | None = None,
        seed: int = 0,
        preset: str | None = None,
        **options: Any,
    ) -> Samples:
        """`num` samples with seeds seed, seed + 1, ..., as the command `generate` makes them.

        `prompt` is text that they start with; in `infill` every ___ stands for `gap` tokens to be filled. Without a
        word about sampling the model's own preset is used. Options are those of the command: nfe=32, refine=4,
        temperature=0.5, ..., or `settings` as a whole. `observe` watches the flow, `batch` is how many share a call.
        """
        from convergeflow.systems.generation import generate

        asked = {"preset": preset, **options}
        return generate(self, num, seed, prompt=prompt, infill=infill, gap=gap, length=length, options=asked)

    def finetune(self, texts: str | Path | Sequence[str | Path], *, out: str | Path, **how: Any) -> LanguageModel:
        """A copy that went on learning from `texts` (files, folders or the texts themselves): see `docs/api.md`."""
        return LATER["finetune"](self, texts, out=out, **how)

    def push_to_hub(self, name: str, **how: Any) -> str:
        """Put model, tokenizer, preset and card on the hub as `owner/name`; returns its address: see `docs/hub.md`."""
        return LATER["push_to_hub"](self, name, **how)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Every `to`, `half` and `double` comes here: weights are float32 or float64, whatever a pass computes in."""
        there = fn(torch.empty(0, dtype=torch.float32))
        if there.dtype.itemsize < 4:
            raise too_short(there.dtype)
        widest = state_dtype_of(there.device)

        def moved(tensor: Tensor) -> Tensor:
            return fn(tensor.to(widest) if tensor.dtype == torch.float64 else tensor)

        return super()._apply(moved, recurse)

    def _check_request(self, num: int, length: int, seeds: Sequence[int], nfe: int) -> None:
        if len(seeds) != num:
            raise UserError(f"{num} samples need {num} seeds, not {len(seeds)}")
        if num > MOST_SAMPLES:
            raise UserError(f"{num:,} samples are more than {MOST_SAMPLES:,} at once: make them in several calls")
        if num < 1 or length < 1 or not 1 <= nfe <= MOST_CALLS:
            raise UserError(
                f"the number of samples, their length and nfe must be at least 1, and nfe at most {MOST_CALLS:,}"
            )

    def _samples(
        self, ids: Tensor, seeds: Sequence[int], calls: Tensor, settings: dict[str, Any], **extras: Tensor
    ) -> Samples:
        texts = None if self.tokenizer is None else [self.tokenizer.decode(row.tolist()) for row in ids]
        settings = {**settings, "precision": self.precision.described()}
        return Samples(ids, list(seeds), int(calls.max()), settings, texts, {"calls": calls, **extras})

    def save_pretrained(self, folder: str | Path, *, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write config.json, model.safetensors and the tokenizer; `state_dict` takes the place of the own weights."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        described = json.dumps(
            {"model_type": self.model_type(), **self.config.to_dict()}, indent=2, sort_keys=True, ensure_ascii=False
        )
        (folder / CONFIG_FILE).write_text(described + "\n", encoding="utf-8")
        write_tensors(folder / WEIGHTS_FILE, self.state_dict() if state_dict is None else state_dict)
        if self.tokenizer is not None:
            self.tokenizer.save(folder)
        if self.card is not None:
            (folder / CARD_FILE).write_text(self.card, encoding="utf-8")
        if self.trained_on is not None:
            write_json(folder / TRAINED_ON, self.trained_on)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, revision: str | None = None, dtype: torch.dtype | str | None = None
    ) -> Self:
        """Load a checkpoint folder, or the hub's `owner/name`, with its tokenizer, ready for use.

        `dtype` is float32, or float64 to compute in it throughout. `LanguageModel` itself loads any system.
        """
        folder = hub_folder(str(folder), revision) if not Path(folder).exists() else Path(folder)
        values = read_config(folder)
        if cls is LanguageModel:
            return class_of_type(values["model_type"]).from_pretrained(folder, dtype=dtype)  # type: ignore[return-value]
        if values["model_type"] != cls.model_type():
            raise UserError(
                f"{folder} holds a model of type {values['model_type']!r}, not {cls.model_type()!r} (see `convergeflow "
                "import --help`)"
            )
        config = cls.config_class.from_dict(values, folder / CONFIG_FILE)
        if not (folder / WEIGHTS_FILE).is_file():
            raise ConvergeFlowError(f"{folder} has no {WEIGHTS_FILE}: copy or train it again")
        weights = read_tensors(folder / WEIGHTS_FILE)
        check_sizes(config, weights, folder / CONFIG_FILE)
        with torch.random.fork_rng(devices=[]):
            model = cls(config)
        model.load_strictly(weights, folder)
        model.take_companions(folder)
        return model.to(dtype_named(dtype)).eval()

    def take_companions(self, folder: Path) -> None:
        """What lies beside the weights: the tokenizer, the card, and what is known of the training text."""
        self.trained_on = recalled(folder)
        if (folder / CARD_FILE).is_file():
            self.card = (folder / CARD_FILE).read_text(encoding="utf-8")
        if (folder / "tokenizer.json").is_file():
            self.tokenizer = Tokenizer.load(folder)
            if self.tokenizer.size > self.config.vocabulary:
                raise UserError(
                    f"the tokenizer in {folder} has {self.tokenizer.size} tokens, the model {self.config.vocabulary}"
                )

    def load_strictly(self, weights: Mapping[str, Tensor], source: str | Path) -> None:
        """Take over weights with exactly the own names and shapes; `source` is named in the error."""
        if wrong := misfits(self.state_dict(), weights):
            raise UserError(
                f"{source} does not hold this model: {wrong} (do the vocabulary and the sizes in {CONFIG_FILE} belong "
                "to these weights?)"
            )
        check_weights(weights, source)
        self.load_state_dict(weights)
