"""Kinds of arguments: what a user gives is of the kind that was declared, or it is refused at once, in one line.

Numbers of numpy and torch become Python's, so that everything kept about a sample can be written as JSON.
"""

from __future__ import annotations

import functools
import operator
import types
import typing
from numbers import Real
from typing import Any

from convergeflow.errors import UserError


def whole(name: str, value: Any, least: int | None = None) -> int:
    """A whole number, of at least so much."""
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise UserError(f"`{name}` must be a whole number, not {_shown(value)}")
    if least is not None and found < least:
        raise UserError(f"`{name}` must be at least {least}, not {found}")
    return found


def text(name: str, value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise UserError(f"`{name}` must be a text, not {_shown(value)}")
    return value


class Checked:
    """A frozen dataclass that checks the kinds of its fields before its own `__post_init__` looks at their values."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = cls.__dict__.get("__post_init__")
        kinds = functools.cache(lambda: typing.get_type_hints(cls))  # not before all of their names are there

        def check(self: Any) -> None:
            for name, kind in kinds().items():
                object.__setattr__(self, name, _of_kind(name, getattr(self, name), kind))
            if own is not None:
                own(self)

        cls.__post_init__ = check  # type: ignore[attr-defined]


def _of_kind(name: str, value: Any, kind: Any) -> Any:
    """The value as the kind; of several kinds it may have any."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and types.NoneType in kinds:
        return None
    if int in kinds:
        return whole(name, value)
    if float in kinds:
        return _number(name, value)
    if isinstance(value, str) and str in kinds:
        return value
    if any(typing.get_origin(each) is tuple for each in kinds) and not isinstance(value, str):
        times = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(times, list | tuple):
            raise UserError(f"`{name}` must be a name or a list of numbers, not {_shown(value)}")
        return tuple(_number(name, each) for each in times)
    if str in kinds:
        raise UserError(f"`{name}` must be a name, not {_shown(value)}")
    wanted = next(each for each in kinds if each is not types.NoneType)
    if not isinstance(value, wanted):
        raise UserError(f"`{name}` must be made by {wanted.__name__}(...), not {_shown(value)}")
    return value


def _number(name: str, value: Any) -> int | float:
    """A number; a whole one stays whole, since records that were kept write it so."""
    if type(value) is int or type(value) is float:
        return value
    if not isinstance(value, bool) and isinstance(value, Real):
        return float(value)
    raise UserError(f"`{name}` must be a number, not {_shown(value)}")


def _shown(value: Any) -> str:
    return " ".join(repr(value).split())[:80]
