"""What can go wrong, in two kinds: the user's mistake and everything else.

A message is one line that says what is wrong and what to do about it. The command line turns `UserError` into exit
code 2 and any other `ConvergeFlowError` into exit code 1, without a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConvergeFlowError(Exception):
    """Something failed that no change of the arguments would have prevented."""


class UserError(ConvergeFlowError, ValueError):
    """An argument, a file or a setting is wrong; the message names the fix."""


def unknown_name(kind: str, name: str, known: Iterable[str], within: str = "") -> UserError:
    """The error for a name that is not in a registry, with the nearest known name; `within` stands before names."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f": did you mean {within + close[0]!r}?" if close else ""
    return UserError(
        f"unknown {kind} {(within + name if within else name)!r}{hint} (known: {', '.join(names) or 'none'})"
    )
