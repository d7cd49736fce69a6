"""A comparison of three systems on a budget of seconds: complete, equal, restartable."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convergeflow.data.stories import stories_law
from convergeflow.errors import UserError
from convergeflow.evaluation.assess import Assessor, assessor_for
from convergeflow.evaluation.protocol import PROTOCOLS
from convergeflow.evaluation.reference import Reference, corpus_reference
from convergeflow.evaluation.scorers import ExactScorer
from convergeflow.results.draw import Measurer
from convergeflow.results.store import Store
from convergeflow.studies.study import Study, SystemResult, training_seconds
from convergeflow.studies.systems import (
    CONTROLLED,
    OURS,
    SYSTEMS,
    controls_swept,
    frontier,
    on_budget,
    run_config,
    systems_named,
)
from convergeflow.studies.table import frontiers, markdown, objective_alone, rows, verdict, write_comparison
from convergeflow.systems import METHODS, rivals
from convergeflow.training.build import build_model, open_corpus
from convergeflow.training.config import resolve
from convergeflow.training.estimate import memory


def test_every_system_has_the_same_budget() -> None:
    for preset in ("test", "stories", "sotu"):
        base = resolve(preset)
        for method in SYSTEMS:
            if method == CONTROLLED:
                continue
            config = run_config(base, method)
            assert config.total_steps == base.total_steps and config.batch == base.batch
            assert config.corpus == base.corpus and config.optimizer == base.optimizer
            shape = ("width", "depth", "heads", "gate_init", "dropout")
            assert all(getattr(config.model.system, name) == getattr(base.model.system, name) for name in shape)
    assert [stage.objective for stage in run_config(resolve("test"), "langflow").stages] == ["ce"]
    assert [stage.objective for stage in run_config(resolve("test"), "elf").stages] == ["ce", "mse"]
    assert run_config(resolve("test"), OURS) == resolve("test")


@pytest.mark.parametrize("steps", [3, 100, 1201, 20_000])
def test_a_budget_keeps_the_recipe_in_proportion(steps: int) -> None:
    base = resolve("stories")
    made = on_budget(base, steps)
    assert made.total_steps == steps
    for before, after in zip(base.stages, made.stages, strict=True):
        assert abs(after.steps / steps - before.steps / base.total_steps) <= 2 / steps
        assert after.warmup <= after.steps and after.lr == before.lr
    assert on_budget(base, base.total_steps) == base
    with pytest.raises(UserError, match="3 stages"):
        on_budget(base, 2)


def test_systems_by_name() -> None:
    assert systems_named("all") == list(SYSTEMS) and systems_named("ar, mdlm") == ["ar", "mdlm"]
    with pytest.raises(UserError, match="did you mean 'mdlm'"):
        systems_named("mdln")
    with pytest.raises(UserError, match="once"):
        systems_named("ar,ar")


def test_every_system_is_read_at_as_many_points() -> None:
    from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel

    ours = ConvergeFlowModel(ConvergeFlowConfig.of_size("test", vocabulary=31, length=16))
    for system in SYSTEMS:
        method = METHODS[system] if system in rivals() else None
        points = frontier(system, ours if method is None else method, 16)
        assert len({point.label for point in points}) == len(points) == 6, system
        assert method is None or len(controls_swept(system)) == 6
        json.dumps(controls_swept(system))


@pytest.mark.parametrize("method", [*rivals(), OURS])
def test_every_system_can_be_estimated(method: str) -> None:
    """ELF's second stage asks for passes of its first: the estimate walks through the stages in their order."""
    changes = ["stages.ce.steps=2", "stages.ce.warmup=0", "stages.mse.steps=2", "batch=2", "corpus.length=8"]
    config = run_config(resolve("test", changes), method)
    model = build_model(config, 31)
    assert memory(config, model)[0].ddp > 0


def test_training_time_adds_up_over_a_resume(tmp_path: Path) -> None:
    assert training_seconds(tmp_path) is None
    records = [{"step": 2, "seconds": 1.0}, {"step": 4, "seconds": 0.5}, {"event": "stop"}, {"step": 3, "seconds": 2.0}]
    (tmp_path / "timing.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert training_seconds(tmp_path) == pytest.approx(2 * 1.0 + 2 * 0.5 + 2.0)


def row(system: str, nfe: int, gen_ppl: float | None) -> dict[str, Any]:
    return {"system": system, "nfe": nfe, "at_data_entropy": {"gen_ppl": gen_ppl, "se": 0.1}}


def test_verdict_is_the_ratio_to_the_best_other_and_to_ar() -> None:
    rivals = [row("ar", 32, 10.0), row("mdlm", 8, 40.0), row("duo", 8, 20.0), row(CONTROLLED, 8, 5.0)]
    said = verdict([*rivals, row(OURS, 8, 11.0)])
    assert "0.55 of duo's" in said[0] and "1.10 of ar's" in said[1]
    assert "does not reach" in verdict([row(OURS, 8, None)])[0]


def test_the_objective_is_judged_noise_by_noise() -> None:
    def result(system: str, shift: float) -> SystemResult:
        noise = np.random.default_rng(0).normal(size=50)  # common to both: it cancels
        points = []
        for k in range(2):
            each = {"nll": (64 * (2 + noise + k + shift)).tolist(), "tokens": [64] * 50}
            points.append((f"s{k}", {"per_sample": each, "entropy": 3.0}, ""))
        return SystemResult(system, 8, points, {})

    found = objective_alone([result(CONTROLLED, 0.0), result(OURS, -0.25), SystemResult("ar", 16, [], {})])
    assert [row["setting"] for row in found] == ["s0", "s1", None]
    for row in found:
        assert row["value"] == pytest.approx(math.exp(-0.25)) and row["se"] == pytest.approx(0.0, abs=1e-9)
    assert "| 8 | **all** |" in markdown([], {"corpus": "c", "about": "a"}, found)
    assert objective_alone([result(OURS, 0.0)]) == []


def test_the_committed_comparison_answers_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given as the folder of the same comparison, it trains and samples nothing, and says what its table says."""
    folder = Path(__file__).parents[2] / "docs" / "results" / "comparison-stories"
    law = stories_law()
    reference = Reference("stories", "89bc682fef16480c", len(law.vocabulary), 64, law=law)
    measurer = Measurer(Store(folder), Assessor(ExactScorer(law), reference), PROTOCOLS["ours-1"], range(64), length=64)
    study = Study(on_budget(resolve("stories", ["model.depth=4"]), 1200), list(SYSTEMS), [16, 64], measurer)

    def refuse(self: Study, method: str) -> Path:
        raise AssertionError(f"{method} would be trained again")

    monkeypatch.setattr(Study, "trained", refuse)
    results = [result for system in study.systems for result in study.results(system)]
    assert len(results) == 2 * len(SYSTEMS) - 1
    committed = json.loads((folder / "table.json").read_text())["rows"]
    made = {(row["system"], row["nfe"]): row for row in rows(results, frontiers(results, "t"))}
    assert made == {(row["system"], row["nfe"]): row for row in committed}


@pytest.mark.slow
def test_a_small_comparison_is_complete_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path / "cache"))
    changes = ["stages.ce.steps=3", "stages.ce.warmup=0", "stages.mse.steps=2", "batch=4", "corpus.length=16"]
    base = resolve("test", [*changes, "corpus.blocks=64", "corpus.heldout_blocks=32", "evaluate_blocks=4"])
    systems = ["ar", "mdlm", CONTROLLED, OURS]

    def study(num: int = 4) -> Study:
        assessor = assessor_for(corpus_reference(open_corpus(base), num, 16))
        measurer = Measurer(Store(tmp_path / "out"), assessor, PROTOCOLS["ours-1"], range(num), 16)
        return Study(base, systems, [6], measurer, bound_draws=1, device="cpu")

    def run(study: Study) -> None:
        write_comparison(study, [made for system in systems for made in study.results(system)], "test")

    costs = study().costs()
    assert [cost.system for cost in costs] == systems
    assert all(cost.sampling > 0 for cost in costs) and costs[0].training > 0
    run(study())
    table = json.loads((tmp_path / "out" / "table.json").read_text())
    assert [entry["system"] for entry in table["rows"]] == systems
    assert [entry["nfe"] for entry in table["rows"]] == [16, 6, 6, 6]
    assert all(entry["parameters"] > entry["parameters_without_table"] > 0 for entry in table["rows"])
    assert all(entry["likelihood"]["nats_per_token"] > 0 for entry in table["rows"])
    assert (tmp_path / "out" / "frontier-nfe6.png").is_file()
    assert "| mdlm |" in (tmp_path / "out" / "table.md").read_text()
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "records").iterdir()}
    runs = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").rglob("model.safetensors")}
    again = study()
    assert sum(cost.training for cost in again.costs()) == 0.0
    run(again)
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "records").iterdir()}
    assert runs == {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").rglob("model.safetensors")}
    # Records alone are enough: nothing is trained again where the weights are gone, unless the question changes.
    shutil.rmtree(tmp_path / "out" / "runs")
    bare = study()
    assert sum(cost.training + cost.sampling for cost in bare.costs()) == 0.0
    run(bare)
    assert json.loads((tmp_path / "out" / "table.json").read_text())["rows"] == table["rows"]
    assert not (tmp_path / "out" / "runs").exists()
    other = study(5)
    assert all(cost.sampling > 0 for cost in other.costs())
