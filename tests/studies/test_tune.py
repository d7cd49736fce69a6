"""The search for a good use of few calls, on functions whose best point is known, and whole on a tiny model."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convergeflow.cli.main import main
from convergeflow.flow.grid import midpoint_grid
from convergeflow.flow.guidance import Controls
from convergeflow.sampling.settings import PRESETS, Settings
from convergeflow.studies import tune
from convergeflow.studies.tune import Tried

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))

import itertools

from tiny_model import saved_word_model


def tried(gen_ppl: float | None, entropy: float, **settings: Any) -> Tried:
    return Tried(Settings(**settings), {"gen_ppl": gen_ppl, "entropy": entropy}, "file")


def test_a_lower_perplexity_does_not_win_by_another_entropy() -> None:
    reference = tried(2.0, 3.40)
    near, far, worse = tried(2.3, 3.39), tried(1.2, 3.0), tried(2.5, 3.405)
    assert tune.ranked(reference, [far, worse, near]) == [near, worse, far]
    assert tune.ranked(reference, [far, tried(None, 3.40)])[-1] is far


def test_better_means_noise_by_noise_and_beyond_the_error() -> None:
    def of(nll: list[float]) -> Tried:
        return Tried(Settings(), {"per_sample": {"nll": nll, "tokens": [64] * len(nll)}}, "file")

    base = [60.0, 90.0, 70.0, 80.0]
    assert tune.better(of([value - 1 for value in base]), of(base))
    assert not tune.better(of([value + 1 for value in base]), of(base))
    assert not tune.better(of([59.0, 92.0, 68.0, 81.0]), of(base))  # by chance


@pytest.mark.parametrize("calls", [2, 4, 5, 8, 16, 33])
def test_every_split_spends_the_calls_and_is_tried_once(calls: int) -> None:
    from convergeflow.flow.schedule import Gumbel

    found = list(tune.splits(PRESETS["sharp"], calls))
    plans = [settings.plan(Gumbel(4.8, 1.1)) for settings in found]
    assert {plan.allocation.nfe for plan in plans} == {calls}
    assert all(settings.temperature == 0.3 for settings in found)
    conditions = {(settings.self_condition, settings.solver) for settings in found}
    assert {("previous", "euler"), ("previous", "multistep")} <= conditions
    assert all(len(plan) >= 2 for plan in plans[1:])


def test_strength_and_heat_start_from_the_best() -> None:
    base = PRESETS["sharp"]
    best = replace(base, nfe=16, controls=replace(base.controls, refine=3), solver="multistep")
    assert [each.controls.scg for each in tune.strengths(best, base)] == pytest.approx([1.0, 1.5, 4.0])
    assert all((each.controls.refine, each.solver) == (3, "multistep") for each in tune.strengths(best, base))
    shortcut = replace(base, nfe=16, controls=Controls(), self_condition="previous")
    assert not list(tune.strengths(shortcut, base))
    assert [each.temperature for each in tune.heats(shortcut, base)] == pytest.approx([0.21, 0.42])


def test_a_warped_grid_is_a_grid_and_the_plain_one_is_among_them() -> None:
    assert tune.warped(5, (1.0, 1.0)) == pytest.approx(midpoint_grid(5).tolist())
    grid = tune.warped(6, (1.7, 0.6))
    assert all(0 < a < b < 1 for a, b in itertools.pairwise(grid))
    assert grid[2] == pytest.approx(1 - (1 - (2.5 / 6) ** 1.7) ** 0.6)


def test_the_pattern_search_finds_a_known_minimum_and_keeps_the_plain_grid_if_that_is_best() -> None:
    def bowl(warp: tuple[float, float]) -> float:
        return (math.log(warp[0]) - 0.45) ** 2 + (math.log(warp[1]) + 0.3) ** 2

    warp, lowest, plain = tune.pattern_search(bowl)
    assert (math.log(warp[0]), math.log(warp[1])) == pytest.approx((0.45, -0.3), abs=1e-9)
    assert lowest == pytest.approx(0.0, abs=1e-12) and plain == pytest.approx(0.45**2 + 0.09)
    assert tune.pattern_search(lambda warp: abs(math.log(warp[0])) + abs(math.log(warp[1])))[0] == (1.0, 1.0)


def test_the_command_writes_settings_that_generate_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "WARPS", (0.3,))
    model = saved_word_model(tmp_path / "words")
    command = ["tune", str(model), "--calls", "4", "--preset", "config-a", "--num", "3", "--out", str(tmp_path / "out")]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["settings"]["nfe"] == 4 and {row["nfe"] for row in result["tried"]} == {4}
    assert result["fresh"]["all calls"]["nfe"] == 64
    path = tmp_path / "out" / "tuned-4.json"
    assert json.loads(path.read_text())["settings"] == result["settings"]
    generate = ["generate", "--model", str(model), "--num", "1", "--preset", str(path), "--json"]
    assert main(generate) == 0
    assert json.loads(capsys.readouterr().out)["nfe"] == 4
    path.write_text('{"settings": {"nfe": "many"}}')
    assert main(generate) == 2
    assert "holds no settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune", "stories-ar"], "whole sequence"),
        (["tune", "stories-small", "--calls", "64"], "smaller number"),
        (["tune", "stories-small", "--preset", "shrp"], "did you mean 'sharp'"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.strip().splitlines()) == 1
