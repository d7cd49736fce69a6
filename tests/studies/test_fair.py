"""The comparison with the same care for all: extras, pilots and seeds are what the rules say, and it goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from convergeflow.evaluation.assess import assessor_for
from convergeflow.evaluation.protocol import PROTOCOLS
from convergeflow.evaluation.reference import corpus_reference
from convergeflow.results.draw import Measurer
from convergeflow.results.store import Store
from convergeflow.studies import fair
from convergeflow.studies.fair import FairStudy, fair_config, with_seeds
from convergeflow.studies.systems import CONTROLLED, OURS, SYSTEMS, run_config
from convergeflow.studies.table import error_of, write_comparison
from convergeflow.systems import METHODS, rivals
from convergeflow.training.build import build_model, open_corpus
from convergeflow.training.config import resolve

TOKEN_SYSTEMS = ("ar", "mdlm", "sedd-absorb", "sedd-uniform", "duo", "flm")


@pytest.mark.parametrize("method", rivals())
def test_every_system_gets_the_extras_that_it_can_have(method: str) -> None:
    base = resolve("stories")
    model = build_model(fair_config(base, method), 31)
    names = {name for name, _ in model.named_parameters()}
    assert any("before.mix" in name for name in names) or method == "langflow"
    if method == "langflow":
        assert any("neighbours.mix" in name for name in names)
    if method in TOKEN_SYSTEMS:
        head = model.network.head.weight
        assert float(head.detach().square().mean().sqrt()) == pytest.approx(0.02, rel=1e-3)
        plain = build_model(run_config(base, method), 31).network.head.weight
        assert not plain.any(), "without the extras a fresh head is zero, as in the papers"


def test_rates_seeds_and_all_else_are_what_the_rules_say() -> None:
    base = resolve("stories")
    for method in (*rivals(), OURS):
        plain, other = run_config(base, method), fair_config(base, method, rate=3.0, seed=1)
        for before, after in zip(plain.stages, other.stages, strict=True):
            assert after.lr == pytest.approx(3 * before.lr) and after.steps == before.steps
            assert after.matrix_lr is not None and after.matrix_lr == pytest.approx(3 * (before.matrix_lr or 0))
        assert other.seed == plain.seed + 1 and other.batch == plain.batch and other.optimizer == plain.optimizer
    assert fair_config(base, OURS) == run_config(base, OURS)
    assert with_seeds(list(SYSTEMS))[:4] == ["ar", OURS, "langflow", CONTROLLED]
    assert with_seeds(list(SYSTEMS))[-3:] == ["ar@1", f"{OURS}@1", "langflow@1"]
    assert with_seeds(["mdlm"]) == ["mdlm"] and with_seeds(["ar", OURS], seeds=1) == ["ar", OURS]
    for points in fair.POINTS.values():
        assert len(points) == 6 == len({json.dumps(point) for point in points})
    assert all(set(point) <= set(METHODS["ar"].controls) for point in fair.AR_POINTS)
    assert all(set(point) <= set(METHODS["elf"].controls) for point in fair.ELF_POINTS)


def test_words_before_reach_the_same_positions_with_and_without_memory() -> None:
    """AR keeps the inputs of the last words beside keys and values: cached and uncached logits agree."""
    config = METHODS["ar"].config_class.of_size("test", vocabulary=11, length=9, dropout=0.0, words_before=3)
    torch.manual_seed(0)
    model = METHODS["ar"](config).double().eval()
    torch.nn.init.normal_(model.network.head.weight)
    tokens = torch.randint(11, (2, 7))
    whole, _ = model.network(tokens)
    past, parts = None, []
    for k in range(7):
        logits, past = model.network(tokens[:, k : k + 1], past)
        parts.append(logits)
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-10)
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    assert torch.equal(model.network(changed)[0][:, :4], whole[:, :4]), "no word looks ahead"


def row(system: str, gen_ppl: float | None, se: float = 0.1) -> dict[str, Any]:
    return {"system": system, "nfe": 8, "at_data_entropy": {"gen_ppl": gen_ppl, "se": se}}


def test_the_error_of_training_is_half_the_distance_of_two_seeds() -> None:
    from convergeflow.studies.table import _with_training_error

    (ar, mdlm) = _with_training_error([row("ar", 4.0, 0.3), row("mdlm", 9.0), row("ar@1", 4.8)])
    assert error_of(ar["at_data_entropy"]) == pytest.approx((0.3**2 + 0.4**2) ** 0.5)
    assert error_of(mdlm["at_data_entropy"]) == 0.1 and "training_se" not in mdlm["at_data_entropy"]
    (alone,) = _with_training_error([row("ar", 4.0), row("ar@1", None)])
    assert error_of(alone["at_data_entropy"]) == 0.1, "a seed without a value says nothing"


@pytest.mark.parametrize(
    ("points", "enough"),
    [
        ([(3.7, 100.0)], False),
        ([(3.7, 100.0), (3.65, 90.0)], False),
        ([(3.7, 100.0), (3.55, 80.0)], True),
        ([(3.5, 100.0), (3.7, 200.0)], True),
        ([(3.7, 100.0), (3.5, None)], False),
        ([(3.6, 100.0)], True),
    ],
)
def test_a_system_is_read_until_its_settings_enclose_the_entropy(
    points: list[tuple[float, float | None]], enough: bool
) -> None:
    records = [{"entropy": entropy, "gen_ppl": value, "real": {"entropy": 3.6}} for entropy, value in points]
    study = FairStudy(resolve("test"), ["ar"], [8], None, enclosing=True)  # type: ignore[arg-type]
    assert study.enough(records) is enough
    everything = FairStudy(resolve("test"), ["ar"], [8], None)  # type: ignore[arg-type]
    assert not everything.enough(records)
    assert study.swept("ar") != everything.swept("ar"), "what is kept of one reading is not taken for the other"


def test_one_rate_needs_no_pilot() -> None:
    study = FairStudy(resolve("test"), ["ar", "mdlm"], [8], None, rates=(0.5,))  # type: ignore[arg-type]
    study.run_pilots("ar")  # has no store to write to: nothing may be made
    assert study.rate("ar") == 0.5
    plain, chosen = run_config(study.base, "ar"), study.config("ar")
    assert chosen.stages[0].lr == pytest.approx(0.5 * plain.stages[0].lr)


@pytest.mark.slow
def test_processes_share_the_systems_and_budgets_of_one_folder(tmp_path: Path) -> None:
    """The same command twice at once: every system is trained by one of them, and both end with all of the tables."""
    small = ["batch=4", "corpus.length=8", "corpus.blocks=64", "corpus.heldout_blocks=32"]
    words = ["compare", "--corpus", "test", "--systems", "ar,mdlm,convergeflow", "--steps", "4,5", "--fair"]
    words += [
        "--rates",
        "1",
        "--nfe",
        "3",
        "--num",
        "3",
        "--bound",
        "1",
        "--out",
        str(tmp_path / "out"),
        "--device",
        "cpu",
    ]
    words += [*small, "evaluate_blocks=4"]
    env = {**os.environ, "CONVERGEFLOW_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "convergeflow", *words]
    both = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    said = [process.communicate(timeout=600) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    trained = [line for _, errors in said for line in errors.splitlines() if "training for" in line]
    assert len(trained) == len(set(trained)) == 3 + 3 + 2, trained
    assert said[0][0] == said[1][0] and "mdlm" in said[0][0]
    kept = json.loads((tmp_path / "out" / "budgets.json").read_text())
    assert [entry["steps"] for entry in kept["budgets"]] == [4, 5] and kept["judged_by"] == "steps-5/table.json"
    rows = json.loads((tmp_path / "out" / "steps-5" / "table.json").read_text())["rows"]
    assert [entry["system"] for entry in rows] == ["ar", "convergeflow", "mdlm"]
    assert "training_se" in rows[0]["at_data_entropy"]


@pytest.mark.slow
def test_a_small_one_chooses_rates_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fair, "PILOT_BLOCKS", 4)
    changes = ["stages.ce.steps=3", "stages.ce.warmup=0", "stages.mse.steps=2", "batch=4", "corpus.length=16"]
    base = resolve("test", [*changes, "corpus.blocks=64", "corpus.heldout_blocks=32", "evaluate_blocks=4"])

    def study() -> FairStudy:
        assessor = assessor_for(corpus_reference(open_corpus(base), 4, 16))
        measurer = Measurer(Store(tmp_path / "out"), assessor, PROTOCOLS["ours-1"], range(4), 16)
        return FairStudy(base, with_seeds(["ar", "elf"]), [6], measurer, bound_draws=1, device="cpu")

    first = study()
    costs = {cost.system: cost for cost in first.costs()}
    assert list(costs) == ["ar", "elf", "ar@1"] and costs["ar"].training > costs["ar@1"].training > 0
    assert first.rate("ar") is None
    results = [result for system in first.systems for result in first.results(system)]
    losses = first.pilots("ar")
    assert len(losses) == 3 and first.rate("ar") == min(losses, key=lambda rate: losses[rate] or 0.0)
    assert json.loads((tmp_path / "out" / "records" / "pilot-elf-1.00.json").read_text())["by"].startswith("mean")
    assert [result.system for result in results] == ["ar", "elf", "ar@1"]
    summary = write_comparison(first, results, "test")
    assert [entry["system"] for entry in summary["rows"]] == ["ar", "elf"]
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "records").iterdir()}
    again = study()
    assert sum(cost.training + cost.sampling for cost in again.costs()) == 0.0
    assert [result.system for system in again.systems for result in again.results(system)] == ["ar", "elf", "ar@1"]
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "records").iterdir()}
