"""The theory experiments find what is proved, and would notice if it were not so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from convergeflow.flow.schedule import Linear
from convergeflow.results.store import Store
from convergeflow.studies.reproduce import proposition1, theorem1, toys
from convergeflow.studies.reproduce.registry import experiment_by_name
from convergeflow.studies.reproduce.result import ExperimentResult
from convergeflow.studies.reproduce.scale import ExperimentScale
from convergeflow.studies.reproduce.verdict import Verdict

THEORY = ("proposition1", "theorem1", "counterexample", "proposition3")


@pytest.mark.parametrize("name", THEORY)
def test_the_theory_is_reproduced_and_drawn(name: str, micro: ExperimentScale, tmp_path: Path) -> None:
    experiment = experiment_by_name(name)
    result = experiment.run(Store(tmp_path), micro)
    judged = experiment.judge(result)
    assert {claim: str(j.verdict) for claim, j in judged.items()} == dict.fromkeys(judged, "reproduced")
    assert all(path.is_file() for path in experiment.draw(result, tmp_path / "figures"))


def test_a_flow_that_does_not_arrive_is_judged_not_reproduced(micro: ExperimentScale, tmp_path: Path) -> None:
    result = experiment_by_name("theorem1").run(Store(tmp_path), micro)
    stuck = [
        {**record, "curve": record["curve"].replace("unconstrained", "prior")}
        for record in result.records
        if record["toy"] == "unconstrained"
    ]
    judgement = theorem1.converges(ExperimentResult("theorem1", "test", stuck), "prior")
    assert judgement.verdict == Verdict.NOT_REPRODUCED


def test_the_factorisation_would_fail_for_the_wrong_kernel() -> None:
    values = proposition1._deviations(0.0)
    assert values["factorisation"] < 1e-12 < 0.02 < values["wrong_kernel"]


def test_the_toy_predictor_is_the_posterior_mean_of_its_prior() -> None:
    table = toys.random_table(4, 6, seed=0)
    log_prior = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64).log()
    at = Linear()(torch.tensor(0.3)).expand(5)
    x = toys.starting_noise(5, 1, 6, seed=1)
    square = (x[:, 0, None] - 0.3 * table).square().sum(-1)
    posterior = (log_prior - square / (2 * 0.7**2)).softmax(-1)
    log_f = toys.ToyPredictor(table, Linear(), toys.prior_base(log_prior))(x, at, None)
    torch.testing.assert_close(log_f.weigh(x, at).mu[:, 0], posterior @ table)


def test_the_wrong_base_weight_is_wrong_but_bounded() -> None:
    log_base = toys.wrong_base(4, 6, seed=0, strength=3.0)
    x = 50 * toys.starting_noise(20, 1, 6, seed=1)
    values = log_base(x, Linear()(torch.tensor(0.3)).expand(20))
    assert float(values.abs().max()) <= 3.0 and float(values.std()) > 1.0
