"""What clients are told: OpenAI's shapes, with what they lack under `convergeflow`, and a sentence for every error."""

from __future__ import annotations

import difflib
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from convergeflow.errors import UserError
from convergeflow.results.frames import Frame
from convergeflow.serving.models import Served
from convergeflow.serving.requests import Completion, Own
from convergeflow.serving.ticket import Answer, Busy, Closing, Job, OutOfTime

KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": " ".join(message.split()), "type": kind, "param": param, "code": None}}


def refused(status: int, message: str, param: str | None = None, **headers: str) -> JSONResponse:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return JSONResponse(error(status, message, param), status, names)


def status_of(failure: BaseException) -> tuple[int, str]:
    """The status and the sentence for a request that failed; what is not expected says nothing of the inside."""
    if isinstance(failure, UserError):
        return 400, str(failure).replace("`length`", "`max_tokens`")  # as OpenAI calls it
    if isinstance(failure, Busy):
        return 429, str(failure)
    if isinstance(failure, OutOfTime | Closing):
        return 503, str(failure)
    if type(failure).__module__.startswith("convergeflow."):
        return 422, str(failure)
    return 500, "the request failed inside the server: its log says why"


def sentence(wrong: ValidationError) -> tuple[str, str | None]:
    """The first mistake of a body as a sentence, and the field it is about."""
    first = wrong.errors(include_url=False, include_context=False)[0]
    # A union's branches are part of pydantic's path, and nothing that a user wrote.
    parts = [
        str(part)
        for part in first["loc"]
        if not re.fullmatch(r"constrained-.*|(str|int|float|bool|list)\b.*", str(part))
    ]
    name = ".".join(parts)[:200] or None
    if first["type"] == "extra_forbidden":
        own = len(parts) > 1 and parts[0] == "convergeflow"
        known = sorted((Own if own else Completion).model_fields)
        close = difflib.get_close_matches(parts[-1][:100], known, n=1, cutoff=0.5)
        hint = f"did you mean `{close[0]}`?" if close else f"known: {', '.join(known)}"
        return f"unknown field `{name}`; {hint}", name
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}", None
    what = first["msg"][:1].lower() + first["msg"][1:]
    return (f"`{name}`: {what}" if name else f"the body: {what}"), name


@dataclass
class Reply:
    """One completion on its way out."""

    asked: Completion
    job: Job
    ident: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    states: dict[int, list[int]] = field(default_factory=dict)
    """The tokens that each sample has had so far, for models that go block after block."""

    @property
    def served(self) -> Served:
        return self.job.served

    def whole(self, answer: Answer, seconds: float) -> dict[str, Any]:
        choices = [self.choice(number, answer, seconds) for number in range(len(answer.ids))]
        return {**self.head(), "choices": choices, "usage": self.usage(answer)}

    def head(self) -> dict[str, Any]:
        return {"id": self.ident, "object": "text_completion", "created": self.created, "model": self.served.name}

    def choice(self, number: int, answer: Answer, seconds: float) -> dict[str, Any]:
        ids = answer.ids[number].tolist()
        own = {
            "seed": self.job.seeds[number],
            "calls": answer.calls[number],
            "seconds": round(seconds, 4),
            "text": self.text(ids),
            "tokens": ids,
            "agreement": dict(answer.agreement[number]) if answer.agreement else {},
        }
        shown = own["text"] if self.asked.convergeflow.diffusing else self.answered(ids)
        return {"index": number, "text": shown, "finish_reason": "length", "logprobs": None, "convergeflow": own}

    def chunk(self, *choices: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        return {**self.head(), "choices": list(choices), **more}

    def states_of(self, frame: Frame) -> Iterable[dict[str, Any]]:
        """A chunk for every sample of a frame: the whole text as it stands."""
        for sample in frame.rows:
            shown = frame.of_sample(sample)
            own: dict[str, Any] = {"seed": self.job.seeds[sample], "calls": frame.calls}
            if sample not in self.states:
                own["known"] = self.known()
            before = self.states.get(sample, [])[: frame.start]
            if not before and frame.start:  # what was given is in front of the first block
                before = self.job.arguments["clamp"].tokens[: frame.start].tolist()
            self.states[sample] = before + shown["tokens"]
            if self.asked.convergeflow.frames:
                own["frame"] = shown
            text = self.text(self.states[sample]) if self.asked.convergeflow.diffusing else ""
            choice = {"index": sample, "text": text, "finish_reason": None, "logprobs": None, "convergeflow": own}
            yield self.chunk(choice)

    def known(self) -> list[list[int]]:
        """Positions and tokens of the words that were given."""
        clamp = self.job.arguments.get("clamp")
        if clamp is None:
            return []
        return [[int(place), int(clamp.tokens[place])] for place in clamp.known.nonzero().flatten()]

    def text(self, ids: list[int]) -> str:
        """As text; masks of a discrete model are left out."""
        size = self.served.tokenizer.size
        return str(self.served.tokenizer.decode([ident for ident in ids if ident < size]))

    def answered(self, ids: list[int]) -> str:
        """What OpenAI's clients expect: without the prompt unless it is to be echoed, and of an infill its middle."""
        text, first = self.text(ids), self.job.given
        if self.asked.echo:
            return text
        last = first + self.asked.convergeflow.gap if self.asked.suffix else len(ids)
        if last < len(ids):
            text = self.text(ids[:last])
        asked = self.asked.prompt or ""  # with the line breaks at its end, which a decoded text has not
        return text.removeprefix(asked if text.startswith(asked) else self.text(ids[:first]))

    def usage(self, answer: Answer) -> dict[str, Any]:
        clamp = self.job.arguments.get("clamp")
        given = 0 if clamp is None else int(clamp.known.sum())
        made = len(answer.ids) * (self.job.length - given)
        return {
            "prompt_tokens": given,
            "completion_tokens": made,
            "total_tokens": given + made,
            "network_calls": sum(answer.calls),
        }


def model_of(served: Served) -> dict[str, Any]:
    """A model as /v1/models shows it."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "convergeflow",
        "convergeflow": served.about,
    }
