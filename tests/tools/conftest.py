"""The scripts of tools/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> Any:
    """A script of tools/, imported; it stays under its name, as dataclasses want it."""
    if (module := sys.modules.get(f"tools_{name}")) is None:
        spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[f"tools_{name}"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def follow() -> ModuleType:
    return script("follow")  # type: ignore[no-any-return]


@pytest.fixture
def site() -> ModuleType:
    return script("site")  # type: ignore[no-any-return]


@pytest.fixture
def animation() -> ModuleType:
    return script("animation")  # type: ignore[no-any-return]
