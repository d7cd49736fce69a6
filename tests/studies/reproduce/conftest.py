"""Fixtures: a scale small enough for a test, and a bench that answers with the paper's own numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convergeflow.sampling.plan import PAPER_SCHEDULE
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import bench as bench_room
from convergeflow.studies.reproduce import paper
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.models import KeptModel
from convergeflow.studies.reproduce.scale import ExperimentScale, scale_by_name


@pytest.fixture(scope="session")
def micro() -> ExperimentScale:
    """Seconds for everything: the sizes of a unit test."""
    return replace(
        scale_by_name("test"),
        length=16,
        num_samples=4,
        sequences=64,
        batch=8,
        start_steps=4,
        scratch_steps=4,
        continued_steps=4,
        collapse_steps=4,
        toy_trajectories=60,
        toy_steps=(16, 64, 384),
        trace_sequences=2,
        agreement_steps=(4, 8),
        shortcut_steps=(2, 4),
        objective_nfe=4,
    )


class _Schedule:
    schedule = PAPER_SCHEDULE


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., set[tuple[int, str]]]:
    """Replaces sampling by known answers: the paper's own numbers where it has them, `other` elsewhere.

    Returns the set of settings that were asked for.
    """
    asked: set[Any] = set()

    def install(
        change: Callable[[float, float], tuple[float, float]] = lambda ppl, entropy: (ppl, entropy),
    ) -> set[Any]:
        by_setting = {(row.nfe, row.controls): row for row in paper.all_rows()}

        def answer(settings: Settings) -> dict[str, Any]:
            row = by_setting.get((settings.nfe, settings.controls))
            steps = settings.nfe // (1 if settings.self_condition == "previous" else settings.controls.refine + 1) or 1
            ppl, entropy = (80.0 + 400.0 / steps, 5.5) if row is None else (row.gen_ppl, row.entropy)
            ppl, entropy = change(ppl, entropy)
            return {
                "gen_ppl": ppl,
                "gen_ppl_se": 0.001 * ppl,
                "entropy": entropy,
                "entropy_se": 0.001,
                "valid": 0.5,
                "distinct": 1.0,
                "distinct_se": 0.0,
                "steps": steps,
                "n": 128,
                "slot_kl": 0.1,
                "per_sample": {"nll": [10 * math.log(ppl)] * 4, "tokens": [10] * 4, "entropy": [entropy] * 4},
            }

        def measure(self: Bench, settings: Settings, *, label: str, **options: Any) -> dict[str, Any]:
            asked.add((settings, options.get("num")))
            return {"label": label, "key": {}, "values": answer(settings), "seconds": 0.0}

        real = {
            "gen_ppl": 20.0,
            "gen_ppl_se": 0.1,
            "entropy": 5.44,
            "entropy_se": 0.001,
            "valid": 1.0,
            "distinct": 1.0,
            "n": 128,
            "slot_kl": 0.0,
        }
        monkeypatch.setattr(Bench, "measure", measure)
        monkeypatch.setattr(Bench, "model", KeptModel("paper", Path("nowhere"), "0"))
        monkeypatch.setattr(Bench, "load", lambda self, kept: _Schedule)
        monkeypatch.setattr(Bench, "real_text", lambda self: {"values": real, "label": "real text", "key": {}})
        monkeypatch.setattr(
            Bench,
            "text",
            lambda self, name, ids, label="": {"values": dict(real, distinct=0.01), "label": name, "key": {}},
        )
        monkeypatch.setattr(bench_room.models, "found", _no_model)
        return asked

    return install


def _no_model(*arguments: Any) -> Any:
    raise AssertionError("no model may be loaded here")
