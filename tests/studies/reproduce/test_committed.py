"""The committed records: found again by their keys, nothing is drawn anew, and every verdict is the one on file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from convergeflow.results.store import Store
from convergeflow.studies.reproduce.registry import experiment_by_name, experiments
from convergeflow.studies.reproduce.scale import scale_by_name
from convergeflow.studies.reproduce.verdict import Verdict

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
JOINT = RESULTS / "reproduction-basic-joint"

REPORTS = {
    "reproduction": ("embedded", tuple(experiments())),
    "reproduction-basic": ("basic", scale_by_name("basic").experiments),
    "reproduction-basic-gentle": ("basic-gentle", scale_by_name("basic-gentle").experiments),
    "reproduction-basic-15000": ("basic", ("configurations",)),
    "reproduction-basic-joint/full": (str(JOINT / "full.yaml"), ("controls",)),
    "reproduction-basic-joint/gentle": (str(JOINT / "gentle.yaml"), scale_by_name("basic-gentle").experiments),
}
"""Folder -> the scale of its report and the experiments that it holds."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies of the reports, each with what lies beside it."""
    results = tmp_path_factory.mktemp("committed")
    for name in (*REPORTS, "comparison-stories", "comparison-basic"):
        shutil.copytree(RESULTS / name, results / name)
    return {name: results / name for name in REPORTS}


@pytest.mark.parametrize(
    ("report", "name"), [(report, name) for report, (_, names) in REPORTS.items() for name in names]
)
def test_nothing_is_measured_again_and_the_verdicts_stand(
    report: str, name: str, kept: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path))
    folder, (scale, _) = kept[report], REPORTS[report]
    before = sorted(folder.rglob("*"))
    experiment = experiment_by_name(name)
    result = experiment.run(Store(folder, measuring=False), scale_by_name(scale))
    assert sorted(folder.rglob("*")) == before
    committed = json.loads((folder / "results" / f"{name}.json").read_text(encoding="utf-8"))
    judged = experiment.judge(result)
    assert len(result.records) == committed["points"]
    assert set(judged) == set(committed["claims"])
    for claim in experiment.claims:
        on_file = committed["claims"][claim.name]
        assert (claim.statement, claim.reference) == (on_file["statement"], on_file["reference"])
        assert judged[claim.name].describe() == {key: on_file[key] for key in ("verdict", "evidence", "paper")}


def judged(name: str) -> dict[str, Any]:
    experiment = experiment_by_name(name)
    return experiment.judge(experiment.run(Store(RESULTS / "reproduction", measuring=False), scale_by_name("embedded")))


def test_no_verdict_contradicts_its_figures() -> None:
    """Three that did: two panels that look alike, a switch that loses to no switch, another study's numbers."""
    convergence = judged("convergence")
    assert convergence["separated"].verdict == Verdict.REPRODUCED
    assert convergence["direct-poorly"].verdict == Verdict.NOT_REPRODUCED  # its bands are as far apart
    objectives = judged("objectives")
    assert objectives["to-mse"].verdict == Verdict.NOT_REPRODUCED  # as many more steps of CE end lower
    assert "12.49" in objectives["to-mse"].evidence and "16.82" in objectives["to-mse"].evidence
    for claim in ("best", "ratio", "ar"):
        assert "another study, comparison-stories" in judged("systems")[claim].evidence


def test_what_is_open_says_why() -> None:
    """More samples, or another corpus: entropy does not move on stories, though the paper's change would be seen."""
    controls = judged("controls")
    assert controls["effective-entropy"].verdict == Verdict.OTHER_CORPUS
    assert controls["numbers"].verdict == Verdict.OTHER_CORPUS
    assert controls["adaptive"].verdict == Verdict.TOO_NOISY
    configurations = judged("configurations")
    assert configurations["a-entropy"].verdict == Verdict.OTHER_CORPUS and "tie" in configurations["a-entropy"].evidence


def test_a_folder_without_records_is_not_measured(tmp_path: Path) -> None:
    grids = experiment_by_name("grids")
    found = grids.judge(grids.run(Store(tmp_path, measuring=False), scale_by_name("embedded")))
    assert found["midpoint"].verdict == Verdict.NOT_MEASURED and not list(tmp_path.iterdir())


def test_experiments_are_named_without_torch() -> None:
    code = (
        "import sys; from convergeflow.studies.reproduce.registry import experiments; "
        "assert [e.describe() for e in experiments().values()]; "
        "print([name for name in ('torch', 'numpy', 'scipy', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
