"""`import convergeflow` is enough for transformers' Auto classes to know its systems, and costs nothing before that.

transformers takes a second or more to load, so this package does not load it. It waits for the module in which the Auto
classes keep their configurations: once that is loaded, `interop.auto` registers the systems.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

AWAITED = "transformers.models.auto.configuration_auto"


def _register() -> None:
    try:
        importlib.import_module("convergeflow.interop.auto")
    except Exception as failure:  # somebody's import of transformers must not fail because of us
        warnings.warn(f"transformers does not know convergeflow's systems: {failure}", stacklevel=2)


class _Then(Loader):
    """Loads a module as it would have been, and registers the systems."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _register()


class _Waiting(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != AWAITED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


def wait_for_transformers() -> None:
    """Register the systems now if the Auto classes are here, else when they come."""
    if AWAITED in sys.modules:
        _register()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())
