"""What a server grants, in one configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from convergeflow.errors import UserError, unknown_name

LARGEST = 10**9
"""Above it a limit is none, and clocks and queues of the libraries overflow."""


@dataclass(frozen=True)
class Limits:
    """Everything that a request could use up; `limit` NAME=VALUE changes one."""

    queue: int = 256
    """Requests that may wait; the next one is told when to come back."""
    rows: int = 16
    """Samples that share a network pass."""
    samples: int = 16
    """Samples of one request (`n`)."""
    length: int = 1024
    """Tokens of a sample."""
    calls: int = 2048
    """Network calls of a sample."""
    body: int = 65536
    """Bytes of a request's body."""
    seconds: float = 300.0
    """From a request's arrival to its end, waiting included."""
    frames: int = 512
    """Frames kept for a client that is slow to read; older ones are dropped."""
    stall: float = 30.0
    """Seconds that one piece of a stream may take to be read, and a body to arrive."""
    grace: float = 60.0
    """Seconds to finish what runs after SIGTERM or Ctrl-C."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if not 0 < getattr(self, each.name) < LARGEST:
                raise UserError(
                    f"the limit {each.name} must be above 0 and below a billion, not {getattr(self, each.name)}"
                )

    def changed(self, pairs: Sequence[str]) -> Limits:
        """With NAME=VALUE pairs in place."""
        known = {each.name: each.type for each in fields(self)}
        values: dict[str, float] = {}
        for pair in pairs:
            name, equals, text = pair.partition("=")
            if not equals:
                raise UserError(f"`limit` needs name=value, not {pair!r}")
            if name not in known:
                raise unknown_name("limit", name, known)
            try:
                values[name] = int(text) if known[name] == "int" else float(text)
            except ValueError:
                raise UserError(f"the limit {name} must be a number, not {text!r}") from None
        return replace(self, **values)  # type: ignore[arg-type]
