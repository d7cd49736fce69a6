"""Finished models at matched entropy: verdicts against closed forms, ties called ties, and the command end to end."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from convergeflow.cli.main import main
from convergeflow.data.tokenizer import byte_tokenizer
from convergeflow.results.record import frontier_of
from convergeflow.studies import matched
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel
from convergeflow.zoo import load_model

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))

from test_frontier import record
from tiny_model import saved_word_model


def curve(*pairs: tuple[float, float], spread: float = 0.02) -> list[Any]:
    """Points of (entropy, log Gen. PPL); the data's entropy is 3.3."""
    return [(f"s{i}", record(h, y, seed=i, spread=spread), "") for i, (h, y) in enumerate(pairs)]


def judged(first: list[Any], other: list[Any]) -> matched.Matched:
    curves = frontier_of("t", "setting", {"first": first, "other": other})
    return matched.against(curves, "first", "other")


def test_models_are_compared_at_the_data_entropy_and_not_at_their_own() -> None:
    """By its own default the second looks better (2.0 against 2.4 nats): it gave up entropy. At 3.3 it is worse."""
    found = judged(curve((3.3, 2.4), (3.4, 2.6)), curve((3.0, 2.0), (3.4, 2.8)))
    assert found.verdict == "worse" and found.ratio is not None
    assert found.ratio.value == pytest.approx(math.exp(2.6 - 2.4), rel=0.01) and found.ratio.n == 400
    assert "data's entropy 3.300" in found.at


def test_what_is_within_the_errors_is_a_tie() -> None:
    wide = judged(curve((3.2, 2.0), (3.4, 2.2), spread=2.0), curve((3.2, 1.95), (3.4, 2.15), spread=2.0))
    assert wide.verdict == "tie" and "tie" in wide.sentence() and "±" in wide.sentence()
    narrow = judged(curve((3.2, 2.0), (3.4, 2.2)), curve((3.2, 1.95), (3.4, 2.15)))
    assert narrow.verdict == "better"
    assert judged(curve((3.2, 2.0), (3.4, 2.2)), curve((3.2, 1.99), (3.4, 2.19))).verdict == "tie", (
        "1 % counts for nothing"
    )


def test_without_the_data_entropy_the_nearest_common_one_is_taken() -> None:
    found = judged(curve((3.4, 2.0), (3.6, 2.4)), curve((3.2, 1.5), (3.5, 2.1)))
    assert found.ratio is not None and "entropy 3.400" in found.at
    assert found.ratio.value == pytest.approx(math.exp(1.9 - 2.0), rel=0.01) and found.verdict == "better"
    apart = judged(curve((3.5, 2.0), (3.6, 2.4)), curve((3.0, 1.5), (3.1, 2.1)))
    assert apart.verdict == "not comparable" and apart.ratio is None and "both reach" in apart.sentence()


def test_an_entropy_beside_the_data_is_called_a_tie_only_within_errors() -> None:
    """Both count as being there (within 0.05 nat); one of them ties."""
    for spread, tie in ((1.0, True), (0.01, False)):
        curves = frontier_of("t", "setting", {"m": curve((3.34, 2.0), spread=spread)})
        (row,) = matched.rows(curves)
        assert row["at_data_entropy"]["tie"] is tie and row["at_data_entropy"]["gap"] == pytest.approx(0.04)
        assert ("(tie)" in matched.cells(row)[5]) is tie


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path / "cache"))
    models = [str(saved_word_model(tmp_path / name)) for name in ("one", "two")]
    command = ["compare", *models, "--num", "4", "--nfe", "8", "--out", str(tmp_path / "out")]
    assert main([*command, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] > 0 and not (tmp_path / "out").exists()
    assert main(command) == 0
    printed = capsys.readouterr()
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    (verdict,) = written["verdicts"]
    # The two folders hold the same weights: the samples are the same, and nothing but a tie can come out.
    assert verdict["says"] in printed.out and verdict["verdict"] in ("tie", "not comparable")
    assert (tmp_path / "out" / "frontier.png").is_file() and models[0] in (tmp_path / "out" / "compare.md").read_text()
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "records").iterdir()}
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdicts"] == [verdict]
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "records").iterdir()}


def test_without_real_text_nothing_is_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path / "cache"))
    model = ConvergeFlowModel(ConvergeFlowConfig(vocabulary=257, width=32, depth=1, heads=1, length=16))
    model.tokenizer = byte_tokenizer()
    names = [str(tmp_path / name) for name in ("one", "two")]
    for name in names:
        model.save_pretrained(name)
    monkeypatch.setattr(matched, "seconds", None)  # the trial samples come next
    assert main(["compare", *names]) == 2
    assert "there is no real text" in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_direct_predictor_is_read_at_the_settings_that_it_has() -> None:
    """It has no token weights: its tokens are read off the prediction, and no temperature cools them."""
    model = load_model("stories-direct")
    settings = [setting.options["settings"] for setting in matched.settings_of(model, 8)]
    assert len(settings) >= 2 and all(each.decode == "prediction" and each.temperature == 1 for each in settings)
    for each in settings:
        assert model.sample(1, 64, seeds=[0], settings=each).ids.shape == (1, 64)
    assert {setting.options["settings"].decode for setting in matched.settings_of(load_model(), 8)} == {"weight"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stories-small"], "two models or more"),
        (["stories-small", "stories-small"], "each once"),
        (["stories-small", "stories-ar", "batch=4"], "compared as they are"),
        (["stories-small", "stories-ar", "--nfe", "8,16"], "at one --nfe"),
        (["stories-small", "sotu-small"], "do not share a tokenizer"),
        (["batch=4", "--force"], "--force is for finished models"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.strip().splitlines()) == 1
