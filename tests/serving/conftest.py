"""Small models, and servers inside the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from convergeflow.serving.api import Server
from convergeflow.serving.limits import Limits
from convergeflow.serving.models import Shelf
from served import write_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    return [
        str(write_model(root / "tiny")),
        str(write_model(root / "blocks", block_length=4)),
        str(write_model(root / "ar", method="ar")),
        str(write_model(root / "langflow", method="langflow")),
    ]


@pytest.fixture
def server(models: list[str]) -> Callable[..., Server]:
    def make(limits: Limits | None = None, **how: Any) -> Server:
        lines: list[str] = []
        made = Server(Shelf(models), limits or Limits(), say=lines.append, **how)
        made.lines = lines  # type: ignore[attr-defined]
        return made

    return make
