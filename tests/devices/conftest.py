from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "systems")]


@pytest.fixture(autouse=True)
def meta_as_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `meta` lacks beside a real device: autocast, and generators."""
    real = torch.autocast

    class Autocast(real):  # type: ignore[misc, valid-type]
        def __init__(self, device_type: str, *values: Any, **options: Any) -> None:
            super().__init__("cpu" if device_type == "meta" else device_type, *values, **options)

    monkeypatch.setattr(torch, "autocast", Autocast)
    monkeypatch.setattr(
        "convergeflow.randomness.generator_on", lambda device, seed: torch.Generator().manual_seed(seed)
    )
