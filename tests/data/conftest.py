"""A cache folder of its own for every test: nothing is read from or left on the machine."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(folder))
    return folder
