"""Things found by name: those of the package, and those that other packages register as entry points.

A package adds to a registry without a line of this one:

    [project.entry-points."convergeflow.solvers"]
    my-solver = "my_package.module:MY_SOLVER"

Nothing is imported before it is asked for, so that naming things costs nothing.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any, TypeVar

from convergeflow.errors import UserError, unknown_name

T = TypeVar("T")


@functools.lru_cache(maxsize=1)
def scanned(path: tuple[str, ...]) -> Any:
    """All entry points of the installed packages: looked for once, and again only if `sys.path` has changed.

    What Python returns has another type in 3.11 than later; both have `select`.
    """
    return metadata.entry_points()


class Registry(Mapping[str, T]):
    """Name -> thing. `known` holds the things themselves, or "module:attribute" to import on first use.

    In a pair with one of these stands, in a line for lists, what it is; things of other packages have no such line.
    """

    def __init__(self, kind: str, group: str, known: Mapping[str, T | str | tuple[T | str, str]]) -> None:
        self.kind, self.group = kind, f"convergeflow.{group}"
        pairs = {name: each if isinstance(each, tuple) else (each, "") for name, each in known.items()}
        self._known = {name: thing for name, (thing, _) in pairs.items()}
        self._meanings = {name: meaning for name, (_, meaning) in pairs.items()}

    def __getitem__(self, name: str) -> T:
        known = self._known.get(name)
        if known is None:
            thing = self._from_elsewhere(name)
        elif isinstance(known, str):
            module, _, attribute = known.partition(":")
            thing = getattr(importlib.import_module(module), attribute)
        else:
            thing = known
        self._known[name] = thing
        return thing

    def __iter__(self) -> Iterator[str]:
        yield from self._known
        yield from sorted({point.name for point in self._points()} - self._known.keys())

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._known or any(point.name == name for point in self._points())

    def meanings(self) -> dict[str, str]:
        """Every name with what it is; nothing is imported for that."""
        return {name: self._meanings.get(name, "") for name in self}

    def _points(self) -> metadata.EntryPoints:
        points: metadata.EntryPoints = scanned(tuple(sys.path)).select(group=self.group)
        return points

    def _from_elsewhere(self, name: str) -> T:
        points = [point for point in self._points() if point.name == name]
        if not points:
            raise unknown_name(self.kind, name, self)
        if len(points) > 1:
            homes = " and ".join(sorted(point.value for point in points))
            raise UserError(f"two packages register the {self.kind} {name!r}: {homes}")
        loaded: T = points[0].load()
        return loaded
