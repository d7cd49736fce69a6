"""The load test itself: a short run finds every answer right, and a wrong expectation is found."""

from __future__ import annotations

import time

import pytest

from convergeflow.benchmarks import serve


def test_a_short_load_is_answered_exactly_and_a_mistake_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "DISTINCT", 6)
    expected = serve.references(4)
    with serve.served() as (process, port):
        row = serve.point(process, port, 3, expected, 4, 2.0)
        assert row["requests"] >= 3 and row["wrong"] == row["lost"] == row["repeated"] == 0
        assert 0 < row["p50_seconds"] <= row["p99_seconds"] and row["processor_seconds_per_request"] > 0
        swapped = [*expected[1:], expected[0]]
        load = serve._drive(port, 2, swapped, 4, until=time.monotonic() + 60, most=6)
        assert load.wrong == 6 and load.lost == 0 and len(load.idents) == 6
        memory = serve._memory(process, port, 20, expected)
        assert len(memory["resident_mb"]) == 10
