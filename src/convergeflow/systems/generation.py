"""What a user asks of a model in Python, as arguments of its sampler: the words of `convergeflow generate` as keywords.

Without a word about sampling a model is sampled as its makers meant it, with the preset in its configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from convergeflow.errors import UserError, unknown_name
from convergeflow.kinds import text, whole
from convergeflow.sampling.settings import Settings
from convergeflow.sampling.wrappers import Clamp
from convergeflow.systems.options import declared, settings_of, tuned
from convergeflow.systems.prompt import Span, followed_by_unknown, gaps_of, known_text, marked

if TYPE_CHECKING:
    from convergeflow.systems.protocol import LanguageModel, Samples

LONGER = 64
"""How many times longer than its training text a model may be asked to write; nothing was ever learned beyond."""
OF_SAMPLE = ("observe", "clamp", "batch", "settings", "noise", "want_logits")
"""Keywords that go to the sampler as they are."""
KINDS: dict[str, tuple[Any, str]] = {
    "settings": (Settings, "made by Settings(...) or preset(...)"),
    "observe": (Callable, "a function of a step"),
    "noise": (Tensor, "a tensor (torch.from_numpy makes one of an array)"),
    "clamp": (Clamp, "a Clamp of tokens"),
}
"""What some of them are."""


def longest(model: LanguageModel) -> int:
    """The most tokens that a sample may have."""
    return LONGER * int(model.config.length)


def one_call_a_token(model: LanguageModel) -> bool:
    """Whether a model writes from left to right, so that its length decides how many calls it makes."""
    return "cache" in model.controls


def check_budget(model: LanguageModel, nfe: int | None) -> None:
    """Refuse a number of calls where it has no effect."""
    if nfe is not None and one_call_a_token(model):
        raise UserError(f"`nfe` has no effect on {model.method}, which makes one network call a token: leave it out")


def calls_of(model: LanguageModel, nfe: int, length: int) -> int:
    """Network calls of a sample for which `nfe` were asked."""
    return length if one_call_a_token(model) else nfe


def check_length(model: LanguageModel, length: int) -> None:
    """Refuse a length far beyond what the model has learned."""
    if length > longest(model):
        raise UserError(
            f"`length` {length:,} is too long: this model learned from {model.config.length} tokens and may make "
            f"{longest(model):,} at most"
        )


@dataclass(frozen=True)
class Outline:
    """How long a sample is, and what of it is given."""

    length: int
    clamp: Clamp | None = None
    gaps: tuple[Span, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """For `sample`."""
        return {} if self.clamp is None else {"clamp": self.clamp}


def outlined(
    model: LanguageModel, prompt: str | None = None, infill: str | None = None, gap: int = 4, length: int | None = None
) -> Outline:
    """The length of a sample and its known tokens; a text behind the known one fills the model's own length."""
    clamp = known_text(model.tokenizer, prompt, infill, gap, longest(model))
    if clamp is None:
        return Outline(int(model.config.length) if length is None else length)
    length = length if length is not None else max(int(model.config.length), len(clamp.tokens))
    check_length(model, length)
    return Outline(length, followed_by_unknown(clamp, length), gaps_of(clamp) if infill is not None else ())


def sampler_arguments(model: LanguageModel, options: Mapping[str, Any], length: int | None = None) -> dict[str, Any]:
    """What `sample` gets for options by name: settings as a whole, or a preset and controls, as on the command line."""
    passed = {name: options[name] for name in OF_SAMPLE if options.get(name) is not None}
    rest = {name: value for name, value in options.items() if name not in OF_SAMPLE and value is not None}
    for name, (kind, wanted) in KINDS.items():
        if name in passed and not isinstance(passed[name], kind):
            raise UserError(f"`{name}` must be {wanted}, not {type(passed[name]).__name__}")
    if "settings" in passed:
        if rest:
            raise UserError(f"`settings` are whole: change `{next(iter(rest))}` in them, or leave `settings` out")
        return passed
    if str(rest.get("preset", "")).endswith(".json"):
        rest["preset"] = tuned(rest["preset"])
    known = [name for name, *_ in declared()]
    controls = {name: value for name, value in rest.items() if name in model.controls and name not in known}
    given = {name: value for name, value in rest.items() if name not in controls}
    for name in given:
        if name not in known:
            raise unknown_name("option", name, [*known, *OF_SAMPLE, *model.controls])
    check_budget(model, given.get("nfe"))
    return passed | model.sampling_arguments(
        given, controls, lambda schedule, own: settings_of(given, schedule, own), length
    )


def generate(
    model: LanguageModel,
    num: int,
    seed: int,
    *,
    prompt: str | None,
    infill: str | None,
    gap: int,
    length: int | None,
    options: Mapping[str, Any],
) -> Samples:
    """`num` samples with consecutive seeds; what fills the gaps of an infill is marked in `Samples.marked`."""
    num, seed, gap = whole("num", num, 1), whole("seed", seed), whole("gap", gap)
    length = None if length is None else whole("length", length, 1)
    for name, given in (("prompt", prompt), ("infill", infill)):
        if given is not None:
            text(name, given)
    if options.get("batch") is not None:
        options = {**options, "batch": whole("batch", options["batch"], 1)}
    outline = outlined(model, prompt, infill, gap, length)
    if outline.clamp is not None and options.get("clamp") is not None:
        raise UserError("`clamp` says which tokens are known: leave `prompt` and `infill` out")
    check_length(model, outline.length)
    arguments = sampler_arguments(model, options, outline.length) | outline.arguments
    return with_marks(
        model, model.sample(num, outline.length, seeds=range(seed, seed + num), **arguments), outline.gaps
    )


def with_marks(model: LanguageModel, samples: Samples, gaps: tuple[Span, ...]) -> Samples:
    """The same samples, with the gaps that they fill in [brackets]."""
    if not gaps or model.tokenizer is None:
        return samples
    return replace(samples, marked=[marked(model.tokenizer, ids, gaps) for ids in samples.ids.tolist()])
