"""The committed records: found again by their keys, nothing is drawn anew, and every verdict is the one on file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from convergeflow.results.store import Store
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.registry import experiment_by_name, experiments
from convergeflow.studies.reproduce.scale import scale_by_name

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
TRAINED = {"convergence", "objectives"}
"""Their records rest on models that are not kept beside them."""
ELSEWHERE = {"natural", "calls"}
"""Needs a corpus that is fetched on request, or a student whose records are still to be made."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("committed") / "reproduction"
    shutil.copytree(RESULTS / "reproduction", folder)
    shutil.copytree(RESULTS / "solvers", folder, dirs_exist_ok=True)
    shutil.copytree(RESULTS / "comparison-stories", folder / "comparison-stories")
    return folder


@pytest.mark.parametrize("name", [name for name in experiments() if name not in TRAINED | ELSEWHERE])
def test_nothing_is_drawn_again_and_the_verdicts_stand(name: str, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "samples", lambda *_: pytest.fail("samples were drawn again"))
    said: list[str] = []
    experiment = experiment_by_name(name)
    result = experiment.run(Store(kept, note=said.append), scale_by_name("embedded"))
    assert said and all(line.endswith(": kept from before") for line in said)
    committed = json.loads((kept / "results" / f"{name}.json").read_text(encoding="utf-8"))
    judged = experiment.judge(result)
    assert len(result.records) == committed["points"]
    assert set(judged) == set(committed["claims"])
    for claim in experiment.claims:
        on_file = committed["claims"][claim.name]
        assert (claim.statement, claim.reference) == (on_file["statement"], on_file["reference"])
        assert judged[claim.name].describe() == {key: on_file[key] for key in ("verdict", "evidence", "paper")}


def test_experiments_are_named_without_torch() -> None:
    code = (
        "import sys; from convergeflow.studies.reproduce.registry import experiments; "
        "assert [e.describe() for e in experiments().values()]; "
        "print([name for name in ('torch', 'numpy', 'scipy', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
