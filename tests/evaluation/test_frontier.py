"""Interpolation at the data's entropy against closed forms, and the files of a frontier."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convergeflow.errors import UserError
from convergeflow.evaluation.frontier import Frontier, FrontierPoint, interpolate, undominated
from convergeflow.files import write_json
from convergeflow.results.pages import frontier_page, page, write_frontier
from convergeflow.results.record import frontier_of, render


def record(
    entropy: float, log_ppl: float, *, spread: float = 0.0, num: int = 200, seed: int = 0, first_seed: int = 0
) -> dict[str, Any]:
    """A record whose samples have these means exactly, and given spreads of NLL and entropy."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, 1, (2, num))
    noise -= noise.mean(1, keepdims=True)
    nll, entropies = 10 * (log_ppl + spread * noise[0]), entropy + spread * noise[1]
    ppl = math.exp(log_ppl)
    return {
        "gen_ppl": ppl,
        "gen_ppl_se": ppl * spread / num**0.5,
        "entropy": entropy,
        "entropy_se": spread / num**0.5,
        "n": num,
        "nfe": 64,
        "seeds": {"first": first_seed, "count": num},
        "per_sample": {"nll": nll.tolist(), "tokens": [10] * num, "entropy": entropies.tolist()},
        "protocol": "ours-1",
        "scorer": "exact",
        "scorer_details": {"weights": "law"},
        "corpus": {"name": "stories", "fingerprint": "law-1"},
        "model": {"name": "m", "weights": "w"},
        "length": 10,
        "exact": {"entropy_per_token": 1.0},
        "real": {"gen_ppl": 3.0, "gen_ppl_se": 0.05, "entropy": 3.3, "entropy_se": 0.01, "n": num},
        "metrics": {"js_2": {"value": 0.2, "se": 0.01, "real": 0.15, "real_se": 0.01}},
        "versions": {"torch": "2"},
    }


def points(*pairs: tuple[float, float], **options: Any) -> list[FrontierPoint]:
    return [FrontierPoint.from_record(i, record(h, y, seed=i, **options)) for i, (h, y) in enumerate(pairs)]


def test_log_perplexity_is_linear_between_the_neighbours() -> None:
    found = interpolate(points((3.0, 2.0), (3.5, 4.0), (3.2, 2.2)), 3.3)
    # between (3.2, 2.2) and (3.5, 4.0): 2.2 + 1.8/3
    assert found.gen_ppl == pytest.approx(math.exp(2.8)) and found.between == [2, 1]
    assert found.se == pytest.approx(0.0, abs=1e-9)


def test_a_point_at_the_data_s_entropy_is_its_own_answer() -> None:
    found = interpolate(points((3.0, 2.0), (3.3, 2.5)), 3.3)
    assert found.gen_ppl == pytest.approx(math.exp(2.5))


def test_points_at_one_entropy_count_with_the_mean_of_their_logarithms() -> None:
    """The value used to be one point's and the interval the other's: samples' entropies are kept to six digits."""
    entropy = 2.0794415416798357
    pair = [
        replace(point, entropy_se=0.0, per_sample={**point.per_sample, "entropy": np.full(40, 2.079442)})
        for point in points((entropy, 1.0), (entropy, 3.0), spread=6.0, num=40)
    ]
    found = interpolate(pair, entropy)
    assert found.gen_ppl == pytest.approx(math.exp(2.0)) and found.between == [0, 1]
    assert found.interval_95 is not None and found.interval_95[0] < found.gen_ppl < found.interval_95[1]
    # beside a third point they are one end of the line
    further = replace(points((2.5, 7.0), spread=6.0, num=40)[0], value=2, entropy_se=0.0)
    halfway = interpolate([*pair, further], (entropy + 2.5) / 2)
    assert halfway.gen_ppl == pytest.approx(math.exp((2.0 + 7.0) / 2)) and halfway.between == [0, 2]


def test_nothing_is_claimed_beyond_the_points() -> None:
    found = interpolate(points((3.0, 2.0), (3.2, 2.5)), 3.3)
    assert found.gen_ppl is None and "stays below" in found.says
    assert "stays above" in interpolate(points((3.5, 2.0)), 3.3).says


def test_a_point_that_another_beats_in_both_is_off_the_frontier() -> None:
    """Guidance that is too strong breaks samples: neither quality nor diversity, and no part of the comparison."""
    curve = points((3.4, 1.0), (3.38, 2.5), (3.2, 7.0), (3.6, 1.5))
    assert [point.value for point in undominated(curve)] == [0, 3]
    assert interpolate(curve, 3.38).gen_ppl == pytest.approx(math.exp(1.0))
    noisy = points((3.4, 1.0), (3.3, 1.1), spread=2.0, num=9)
    assert len(undominated(noisy)) == 2, "a difference within the errors says nothing"


def test_a_nearest_point_within_the_errors_is_at_the_data_s_entropy() -> None:
    curve = points((3.0, 2.0), (3.2, 2.5))  # without spread: the data's own error is all there is
    assert interpolate(curve, 3.24).gen_ppl == pytest.approx(math.exp(2.5)), "within 0.05 nat"
    found = interpolate(curve, 3.3, 0.06)
    assert found.gen_ppl == pytest.approx(math.exp(2.5)) and found.between == [1, 1]
    assert "its nearest point, 1" in found.says
    assert interpolate(curve, 3.3, 0.04).gen_ppl is None
    assert interpolate(curve, 2.9, 0.06).gen_ppl == pytest.approx(math.exp(2.0))


def test_bootstrap_error_is_the_propagated_one() -> None:
    # two points of other seeds with slope zero: se of the mean of two independent values
    spread, num = 0.2, 400
    near = [
        FrontierPoint.from_record(i, record(h, 2.0, spread=spread, num=num, seed=i, first_seed=1000 * i))
        for i, h in enumerate((3.0, 3.6))
    ]
    found = interpolate(near, 3.3, bootstraps=2000)
    assert found.se is not None and found.gen_ppl is not None
    assert found.se / found.gen_ppl == pytest.approx(spread / num**0.5 / 2**0.5, rel=0.1)
    # a slope s carries the entropies' errors and the data's own: s^2 (se_H^2/2 + se_data^2) more
    steep = [
        FrontierPoint.from_record(i, record(h, y, spread=spread, num=num, seed=i, first_seed=1000 * i))
        for i, (h, y) in enumerate(((3.0, 1.4), (3.6, 2.6)))
    ]
    found = interpolate(steep, 3.3, entropy_se=0.01, bootstraps=2000)
    expected = math.sqrt(spread**2 / num / 2 + 4 * (spread**2 / num / 2 + 0.01**2))
    assert found.se is not None and found.gen_ppl is not None
    assert found.se / found.gen_ppl == pytest.approx(expected, rel=0.1)


def test_points_of_the_same_seeds_are_resampled_together() -> None:
    # the same noise in both points: averaging does not help, and treating them as independent would claim it does
    spread, num = 0.2, 400
    same = [FrontierPoint.from_record(h, record(h, 2.0, spread=spread, num=num, seed=7)) for h in (3.0, 3.6)]
    found = interpolate(same, 3.3, bootstraps=2000)
    assert found.se is not None and found.gen_ppl is not None
    assert found.se / found.gen_ppl == pytest.approx(spread / num**0.5, rel=0.1)


@pytest.fixture
def frontier() -> Frontier:
    curves = {
        "schedule A": [(w, record(3.5 - 0.1 * w, 2.4 - 0.2 * w, spread=0.1, seed=w), str(w)) for w in (1, 2, 3)],
        "schedule C": [(w, record(3.5 - 0.05 * w, 2.0 - 0.2 * w, spread=0.1, seed=w), None) for w in (1, 2)],
    }
    return frontier_of("model: scg at NFE 64", "scg", curves, command="convergeflow sweep")


def test_frontier_files(frontier: Frontier, tmp_path: Path) -> None:
    assert frontier.floor == pytest.approx(math.e)
    described = frontier.describe()
    assert described["curves"][0]["at_data_entropy"]["gen_ppl"] == pytest.approx(math.exp(2.0))
    assert described["curves"][1]["at_data_entropy"]["gen_ppl"] is None
    write_json(tmp_path / "frontier.json", described)
    text = render(json.loads((tmp_path / "frontier.json").read_text()))
    assert "at the data's entropy 3.300" in text and "stays above" in text
    write_frontier(frontier, tmp_path, "frontier")
    rows = list(csv.DictReader((tmp_path / "frontier.csv").open()))
    assert len(rows) == 6 and rows[0]["scg"] == "1" and rows[-1]["curve"] == "real text"
    assert float(rows[-1]["entropy"]) == 3.3
    drawn = [tmp_path / "frontier.png", tmp_path / "frontier.svg"]
    assert all(path.stat().st_size > 5000 for path in drawn)
    before = [path.read_bytes() for path in drawn]
    write_frontier(frontier, tmp_path, "frontier")
    assert before == [path.read_bytes() for path in drawn], "the same figure gives the same file"


def test_page_stands_alone_and_says_everything(frontier: Frontier, tmp_path: Path) -> None:
    metrics = [("schedule A", 1, {"js_2": {"value": 0.2, "se": 0.01, "real": 0.15, "real_se": 0.01}})]
    write_frontier(frontier, tmp_path, "frontier")
    shown = page(frontier_page(frontier, metrics, "frontier.svg"), tmp_path)
    for said in ("data:image/svg+xml;base64,", "bootstrap", "convergeflow sweep", "js_2"):
        assert said in shown
    for outside in ("<script", "<link", 'src="http', 'src="frontier', "url(http"):
        assert outside not in shown


def test_records_of_different_things_make_no_frontier() -> None:
    one, other = record(3.0, 2.0), {**record(3.2, 2.0), "protocol": "duo-2026"}
    with pytest.raises(UserError, match="cannot be compared"):
        frontier_of("t", "scg", {"a": [(1, one, None), (2, other, None)]})
    with pytest.raises(UserError, match="at least one point"):
        frontier_of("t", "scg", {})
