"""One point: strengths that mean the same at another width, and scores with errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from convergeflow.flow.budget import allocate
from convergeflow.flow.guidance import Controls, effective_strengths
from convergeflow.flow.schedule import gumbel_for_width
from convergeflow.results.store import Store
from convergeflow.sampling.plan import PAPER_SCHEDULE
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import paper
from convergeflow.studies.reproduce.bench import Bench, carried_over
from convergeflow.studies.reproduce.scale import ExperimentScale


def test_at_the_papers_schedule_the_nominal_strengths_stay() -> None:
    for row in paper.all_rows()[::5]:
        assert carried_over(row.nfe, row.controls, PAPER_SCHEDULE) == Settings(nfe=row.nfe, controls=row.controls)


def test_at_another_width_the_effective_strengths_are_equal() -> None:
    controls = Controls.configuration("C", refine=100, scg=40.0, ug=0.5)
    here = gumbel_for_width(128)
    carried = carried_over(64, controls, here).controls
    last = allocate(64, controls, PAPER_SCHEDULE).grid[-1]
    theirs, ours = (effective_strengths(controls, PAPER_SCHEDULE(last)), effective_strengths(carried, here(last)))
    assert [float(value) for value in ours] == pytest.approx([float(value) for value in theirs])
    assert carried.scg < 0.7 * controls.scg and carried.refine < controls.refine


def test_constant_strengths_are_not_touched() -> None:
    controls = Controls.configuration("A", refine=8, scg=1.5)
    assert carried_over(64, controls, gumbel_for_width(32)).controls == controls


def test_scores_of_real_text_and_of_one_text_repeated(micro: ExperimentScale, tmp_path: Path) -> None:
    bench = Bench(Store(tmp_path), micro)
    real = bench.real_text()["values"]
    law = bench.reference.law
    assert law is not None and bench.reference.real is not None
    # eps = 1e-3 of the score law costs log(1/(1 - eps)) per token on valid text, and hardly more.
    expected = np.exp(law.clean_nll(bench.reference.real).sum() / bench.reference.real.size)
    assert real["gen_ppl"] == pytest.approx(expected, rel=0.01) and real["valid"] == 1.0 and real["distinct"] == 1.0
    one = bench.score(np.repeat(bench.reference.real[:1], 4, axis=0))
    assert one["distinct"] == 0.25 and one["entropy_se"] == pytest.approx(0.0, abs=1e-12)
