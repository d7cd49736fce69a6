"""What a client may ask: the fields of OpenAI's completions with a meaning here, and our controls under one object.

Unknown fields are refused. The controls are those that the settings declare, so a new one is here without a change.
"""

from __future__ import annotations

import math
import secrets
import typing
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, create_model

from convergeflow.errors import UserError
from convergeflow.sampling.wrappers import Clamp
from convergeflow.serving.limits import Limits
from convergeflow.serving.models import Served
from convergeflow.serving.ticket import Job
from convergeflow.systems.generation import calls_of, check_budget, one_call_a_token
from convergeflow.systems.options import declared, settings_of
from convergeflow.systems.prompt import GAP, followed_by_unknown, known_text
from convergeflow.systems.protocol import LanguageModel

LARGEST_SEED = 2**53 - 1
"""The largest whole number that every JSON reader keeps."""
Text = Annotated[str, StringConstraints(max_length=20_000)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Pin(Strict):
    """A word that is held fixed at a position."""

    position: int = Field(ge=0, lt=1 << 20)
    token: int | None = Field(None, ge=0, lt=1 << 24, description="The token's id, or give `text`.")
    text: Annotated[str, StringConstraints(min_length=1, max_length=100)] | None = Field(
        None, description="A text that is one token."
    )


class _Own(Strict):
    """Controls of the sampler, what is held fixed, and what is streamed."""

    diffusing: bool = Field(False, description="Stream the whole text at every step; it replaces the one before.")
    frames: bool = Field(False, description="Stream a frame with every text: weights, distances, entropy.")
    gap: int = Field(4, ge=1, le=1024, description="Unknown tokens between `prompt` and `suffix`.")
    pins: list[Pin] = Field(default_factory=list, max_length=1024, description="Words held fixed at positions.")
    set: dict[str, str | int | float | bool] = Field(
        default_factory=dict, max_length=32, description="Controls that only this model's method has."
    )

    def given(self) -> dict[str, Any]:
        """The sampling options that were asked for."""
        apart = set(_Own.model_fields)
        return {name: value for name, value in self.model_dump(exclude_none=True).items() if name not in apart}


def _kind(kind: Any) -> Any:
    """The JSON type of an option: a whole number may be written for a float, a list for a tuple."""
    parts = [part for part in typing.get_args(kind) if part is not type(None)] or [kind]
    if typing.get_origin(kind) is tuple:
        parts = [kind]
    found: list[Any] = []
    for part in parts:
        if typing.get_origin(part) is tuple:
            found.append(Annotated[list[float], Field(min_length=1, max_length=4096)])
        elif part is str:
            found.append(Annotated[str, StringConstraints(max_length=40)])
        elif part is int:
            found.append(Annotated[int, Field(ge=-(2**31), lt=2**31)])
        else:
            found.append(part)
    return typing.Union[tuple(found)]  # noqa: UP007


if typing.TYPE_CHECKING:
    Own = _Own
else:
    Own = create_model(
        "Controls",
        __base__=_Own,
        **{name: (_kind(kind) | None, Field(None, description=words)) for name, kind, words, _ in declared()},
    )


class StreamOptions(Strict):
    include_usage: bool = False


class Completion(Strict):
    """The body of a request for completions."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=200)] = Field(description="A name of /v1/models.")
    prompt: Text | None = Field(None, description="Text that every sample starts with; none for a free sample.")
    suffix: Text | None = Field(None, description="Text behind a gap: the gap is filled (`convergeflow.gap` tokens).")
    max_tokens: int | None = Field(None, ge=1, lt=1 << 20, description="The whole length in tokens, prompt included.")
    n: int = Field(1, ge=1, lt=1 << 20, description="Samples, from consecutive seeds.")
    seed: int | None = Field(None, ge=0, le=LARGEST_SEED, description="Of the first sample; drawn if absent.")
    temperature: float | None = Field(None, gt=0, le=1000, description="As `convergeflow.temperature`.")
    echo: bool = Field(False, description="Whether the prompt is part of the text.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    convergeflow: Own = Field(
        default_factory=lambda: Own.model_validate({}), description="Controls that OpenAI's interface does not have."
    )


def job_of(asked: Completion, served: Served, limits: Limits) -> Job:
    """A checked job; raises `UserError` with what to change."""
    own, model = asked.convergeflow, served.model
    if asked.n > limits.samples:
        raise UserError(f"`n` is at most {limits.samples} on this server, not {asked.n}")
    _check_effect(asked)
    clamp = _known(asked, served)
    given_tokens = 0 if clamp is None else int(clamp.known.long().cumprod(0).sum())
    length = asked.max_tokens or max(model.config.length, 0 if clamp is None else len(clamp.tokens))
    if length > limits.length:
        raise UserError(f"`max_tokens` is at most {limits.length} on this server, not {length}")
    clamp = _pinned(served, own.pins, None if clamp is None else followed_by_unknown(clamp, length), length)
    arguments = _arguments(asked, model, length)
    calls = calls_of(model, arguments["settings"].nfe if "settings" in arguments else arguments["nfe"], length)
    if calls > limits.calls:
        what = "max_tokens" if one_call_a_token(model) else "nfe"
        raise UserError(f"`{what}` is at most {limits.calls} on this server, not {calls}")
    if calls < 1:
        raise UserError(f"`nfe` must be at least 1, not {calls}")
    if "settings" in arguments:
        _check_plans(model.as_flow(), arguments["settings"], length, clamp, limits)
    else:
        for name in own.set:
            if name not in model.controls:
                raise UserError(f"{model.method} has no control {name!r}: it has {', '.join(model.controls) or 'none'}")
    if clamp is not None:
        arguments = {**arguments, "clamp": clamp}
    seed = secrets.randbelow(LARGEST_SEED - limits.samples) if asked.seed is None else asked.seed
    watched = asked.stream and (own.diffusing or own.frames)
    return Job(served, range(seed, seed + asked.n), length, arguments, watched, given_tokens)


def _arguments(asked: Completion, model: LanguageModel, length: int) -> dict[str, Any]:
    """How the samples are to be made."""
    given = asked.convergeflow.given()
    if isinstance(given.get("grid"), list):
        given["grid"] = tuple(given["grid"])
    elif str(given.get("grid", "")).endswith(".npy"):
        raise UserError("`grid` is a name or a list of times here, not a file")
    if asked.temperature is not None:
        given["temperature"] = asked.temperature
    check_budget(model, given.get("nfe"))
    return model.sampling_arguments(
        given, asked.convergeflow.set, lambda schedule, preset: settings_of(given, schedule, preset), length
    )


def _check_effect(asked: Completion) -> None:
    """Refuse what would have no effect, and what is said twice."""
    own = asked.convergeflow
    if "gap" in own.model_fields_set and not asked.suffix:
        raise UserError("`gap` has no effect without `suffix`")
    streamed = {"diffusing": own.diffusing, "frames": own.frames, "stream_options": asked.stream_options is not None}
    for name, wanted in streamed.items():
        if wanted and not asked.stream:
            raise UserError(f"`{name}` has no effect without `stream`")
    if asked.temperature is not None and own.given().get("temperature") is not None:
        raise UserError("`temperature` stands in the request and in `convergeflow`: give one of them")


def _check_plans(flow: Any, settings: Any, length: int, clamp: Clamp | None, limits: Limits) -> None:
    """What can be known to be impossible before anything runs."""
    if settings.controls.refine > limits.calls:
        raise UserError(f"`refine` is at most {limits.calls} on this server, not {settings.controls.refine}")
    for piece in flow.pieces(settings, length, clamp):
        plan = piece.settings.plan(flow.schedule)
        if not all(map(math.isfinite, [*plan.w_scg, *plan.w_ug])):
            raise UserError("`scg` or `ug` is too large")
    if clamp is not None:
        clamp.resolved(1, length, flow.config.vocabulary, flow.device)


def _known(asked: Completion, served: Served) -> Clamp | None:
    """The tokens of prompt and suffix."""
    for name, text in (("prompt", asked.prompt), ("suffix", asked.suffix)):
        if text and GAP in text and (asked.suffix or served.tokenizer.kind == "word"):
            raise UserError(f"`{name}` must not hold {GAP}: the gap is between `prompt` and `suffix`")
    if asked.suffix:
        return known_text(served.tokenizer, None, f"{asked.prompt or ''}{GAP}{asked.suffix}", asked.convergeflow.gap)
    return known_text(served.tokenizer, asked.prompt, None, 1) if asked.prompt else None


def _pinned(served: Served, pins: list[Pin], clamp: Clamp | None, length: int) -> Clamp | None:
    if not pins:
        return clamp
    tokens = torch.zeros(length, dtype=torch.long) if clamp is None else clamp.tokens.clone()
    known = torch.zeros(length, dtype=torch.bool) if clamp is None else clamp.known.clone()
    for pin in pins:
        if pin.position >= length:
            raise UserError(f"a pin is at position {pin.position}, behind the last of {length}")
        if (pin.token is None) == (pin.text is None):
            raise UserError("a pin needs either `token` or `text`")
        token = pin.token if pin.token is not None else _one_token(served, pin.text or "")
        if token >= served.model.config.vocabulary:
            raise UserError(f"a pin has token {token}, the vocabulary has {served.model.config.vocabulary}")
        if known[pin.position] and tokens[pin.position] != token:
            raise UserError(f"a pin at position {pin.position} contradicts `prompt`, `suffix` or another pin: drop one")
        tokens[pin.position], known[pin.position] = token, True
    return Clamp(tokens, known)


def _one_token(served: Served, text: str) -> int:
    names = served.tokenizer.tokens()
    if text == "\u23ce":
        return int(served.tokenizer.end_id)
    if served.tokenizer.kind == "word" and text.lower() in names:
        return int(names.index(text.lower()))
    ids = served.tokenizer.encode(text)
    if len(ids) != 1:
        raise UserError(f"{text!r} is {len(ids)} tokens of this model: pin them one by one")
    return int(ids[0])
