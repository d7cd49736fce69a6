"""The command from end to end at the size of a unit test: models, records, report, and going on after a stop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from convergeflow.cli.main import main
from convergeflow.results.store import Store
from convergeflow.studies.reproduce import report, scale
from convergeflow.studies.reproduce.registry import experiment_by_name, experiments
from convergeflow.studies.reproduce.scale import ExperimentScale

TRAINED = ("convergence", "objectives", "token-rules", "sanity", "systems", "facts")


@pytest.fixture(scope="module")
def done(
    micro: ExperimentScale, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, list[report.Finished]]]:
    folder = tmp_path_factory.mktemp("reproduction")
    chosen = [experiment_by_name(name) for name in TRAINED]
    yield folder, report.reproduce(chosen, Store(folder), micro)


def test_every_claim_has_a_verdict_with_evidence(done: tuple[Path, list[report.Finished]]) -> None:
    _, finished = done
    for one in finished:
        assert set(one.judgements) == {claim.name for claim in one.experiment.claims}
        assert all(judgement.evidence for judgement in one.judgements.values())
    assert sum(report.counts(finished).values()) == sum(len(one.judgements) for one in finished)


def test_claims_about_language_are_not_decided_by_a_model_of_seconds(done: tuple[Path, list[report.Finished]]) -> None:
    _, finished = done
    for one in finished:
        for claim in one.experiment.claims:
            if "test" not in claim.scales:
                paper_alone = claim.scales == ("paper",)
                assert one.judgements[claim.name].verdict == ("needs another corpus" if paper_alone else "not measured")


def test_the_page_holds_everything_and_nothing_outside(done: tuple[Path, list[report.Finished]]) -> None:
    folder, finished = done
    page = (folder / "report.html").read_text(encoding="utf-8")
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == len(finished)
    assert 'src="http' not in page and "<script" not in page
    for one in finished:
        assert f'id="{one.experiment.name}"' in page and f"## {one.experiment.name}" in text
        for claim in one.experiment.claims:
            assert claim.statement.replace('"', "&quot;").replace(">", "&gt;") in page
    for line in text.splitlines():
        if line.startswith("!["):
            assert (folder / line.split("(")[1].rstrip(")")).is_file()


def test_a_second_run_measures_nothing_and_says_the_same(
    done: tuple[Path, list[report.Finished]], micro: ExperimentScale
) -> None:
    folder, finished = done
    said: list[str] = []
    again = report.reproduce([one.experiment for one in finished], Store(folder, note=said.append), micro)
    assert [one.describe()["claims"] for one in again] == [one.describe()["claims"] for one in finished]
    points = [line for line in said if line.startswith("[")]
    assert points and all("kept from before" in line for line in points)


def test_the_two_models_of_the_convergence_study_share_the_table(done: tuple[Path, list[report.Finished]]) -> None:
    from convergeflow.zoo import load_model

    folder, _ = done
    loaded = {}
    for name in ("start-ce", "scratch-weighted", "scratch-direct"):
        (run,) = (folder / "models").glob(f"{name}-*")
        loaded[name] = load_model(run)
    with torch.no_grad():  # a settled table that could learn would be normalised again
        tables = [model.network.embedding.rows() for model in loaded.values()]
    assert all((table == tables[0]).all() for table in tables)
    assert loaded["scratch-direct"].config.predictor == "direct"
    assert loaded["scratch-weighted"].config.schedule == {"kind": "linear"}


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == list(experiments())
    assert main(["reproduce", "--list"]) == 0
    assert "theorem1" in capsys.readouterr().out


def test_the_command_writes_a_report_and_prints_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "proposition1", "--out", str(tmp_path / "out"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdicts"].pop("reproduced") == 3 and not any(printed["verdicts"].values())
    assert (tmp_path / "out" / "proposition1.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["reproduce"], "name an experiment or all"),
        (["reproduce", "theorem2"], "did you mean 'theorem1'"),
        (["reproduce", "theorem1", "--scale", "embeded"], "did you mean 'embedded'"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.strip().splitlines()) == 1


def test_a_model_that_is_not_there_is_asked_for_by_name(tmp_path: Path) -> None:
    from convergeflow.errors import UserError
    from convergeflow.studies.reproduce.models import sampled_model

    with pytest.raises(UserError, match="convergeflow-owt"):
        sampled_model(Store(tmp_path), scale.scale_by_name("paper"))
