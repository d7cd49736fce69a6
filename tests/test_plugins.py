"""Other packages add to this one by entry points alone: the examples of docs/extending.md, seen from outside.

`tests/outside.py` does the same with an installed wheel and on the command line.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import tomllib
import zlib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

import convergeflow as cf
from convergeflow.data import CORPORA
from convergeflow.data.prepare import prepare
from convergeflow.errors import UserError
from convergeflow.evaluation.scorers import SCORERS
from convergeflow.flow import GRIDS, SOLVERS
from convergeflow.flow.grid import grid_by_name
from convergeflow.flow.guidance import GUIDANCE
from convergeflow.flow.schedule import SCHEDULES, Linear, schedule_from
from convergeflow.plugins import Registry, scanned
from convergeflow.systems import METHODS, class_of_type
from convergeflow.training.build import build_model
from convergeflow.training.config import resolve
from convergeflow.zoo import load_model

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "plugins"
LONGEST = 60
"""Lines of an example."""


def entry_points() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = tomllib.loads((EXAMPLES / "pyproject.toml").read_text())["project"][
        "entry-points"
    ]
    return found


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The examples as an installer would have put them there."""
    info = tmp_path / "convergeflow_workshop-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: convergeflow-workshop\nVersion: 1.0\n")
    lines = []
    for group, points in entry_points().items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (tmp_path / "workshop").symlink_to(EXAMPLES / "workshop")
    monkeypatch.syspath_prepend(str(tmp_path))
    # What a registry has loaded it keeps; these must forget it again.
    for registry in (METHODS, SCHEDULES, SOLVERS, GRIDS, GUIDANCE, CORPORA, SCORERS):
        monkeypatch.setattr(registry, "_known", dict(registry._known))
    return tmp_path


def test_there_is_a_short_example_of_everything_and_the_page_shows_it() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    groups = {registry.group for registry in (METHODS, SOLVERS, GRIDS, GUIDANCE, SCHEDULES, CORPORA, SCORERS)}
    assert set(entry_points()) == groups
    for path in EXAMPLES.glob("workshop/*.py"):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) < LONGEST, path
        assert path.name == "__init__.py" or f"```python\n{text}```" in page, f"docs/extending.md differs from {path}"
    for group, points in entry_points().items():
        assert group in page and all(name in page for name in points)


def test_a_system_is_named_configured_built_saved_and_loaded(other_package: Path, tmp_path: Path) -> None:
    assert "bigram" in METHODS and list(METHODS)[-1] == "bigram"
    model = build_model(resolve("test", ["model.method=bigram", "model.smoothing=0.5"]), 11)
    with pytest.raises(UserError, match=r"did you mean 'model\.smoothing'"):
        resolve("test", ["model.method=bigram", "model.smothing=0.5"])
    tokens = torch.tensor([[3, 4, 5, 6]])
    assert model.bound(tokens).nats_per_token == pytest.approx(math.log(11)), "a fresh one is the uniform law"
    with torch.no_grad():
        model.network.weight.fill_(-50.0)
        for before, after in ((3, 4), (4, 5), (5, 6), (6, 3)):
            model.network.weight[after, before] = 50.0
    # 1/11 for the first token, then 0.5 + 0.5/11 for each that follows the rule.
    exact = (math.log(11) - 3 * math.log(0.5 + 0.5 / 11)) / 4
    assert model.bound(tokens).nats_per_token == pytest.approx(exact)
    made = model.generate(4, length=400, seed=1)
    assert made.nfe == 400
    pairs = [(a, b) for row in made.ids.tolist() for a, b in itertools.pairwise(row) if a in (3, 4, 5, 6)]
    share = sum(b == {3: 4, 4: 5, 5: 6, 6: 3}[a] for a, b in pairs) / len(pairs)
    assert share == pytest.approx(0.5 + 0.5 / 11, abs=4 * 0.5 / len(pairs) ** 0.5)
    model.save_pretrained(tmp_path / "saved")
    assert class_of_type("convergeflow-bigram") is type(model)
    assert load_model(tmp_path / "saved", device="cpu").config == model.config


def test_a_schedule_is_used_by_its_kind(other_package: Path) -> None:
    schedule = schedule_from({"kind": "power", "power": 3.0})
    assert float(schedule(torch.tensor(0.5)).alpha) == 0.125
    times = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    torch.testing.assert_close(schedule.time_at(-schedule(times).gamma), times)
    model = build_model(resolve("test", ["model.schedule.kind=power", "model.schedule.power=3"]), 11)
    assert model.as_flow().schedule == schedule  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"did you mean 'model\.schedule\.power'"):
        resolve("test", ["model.schedule.kind=power", "model.schedule.powr=3"])


def test_a_solver_follows_what_is_linear_in_its_clock_exactly(other_package: Path) -> None:
    times = torch.tensor([0.2, 0.35, 0.6, 0.7], dtype=torch.float64)
    points = [Linear()(t) for t in times]
    clock = [float(at.alpha / at.sigma) for at in points]
    x = torch.ones(1, 1, 1, dtype=torch.float64) * points[1].sigma  # x/sigma = 1 at the second point
    history = (torch.full_like(x, clock[0]), points[0])
    moved = SOLVERS["adams"].advance(x, torch.full_like(x, clock[1]), points[1], points[2], 0.0, history)
    # mu = c, so x/sigma grows by (c2^2 - c1^2)/2.
    expected = 1 + (clock[2] ** 2 - clock[1] ** 2) / 2
    assert float(moved / points[2].sigma) == pytest.approx(expected)


def test_a_solver_a_grid_and_a_guidance_schedule_are_settings_by_their_names(other_package: Path) -> None:
    model = cf.load("stories-small", device="cpu")
    seen: list[cf.Step] = []
    samples = model.generate(
        nfe=4, solver="adams", grid="late", refine=0, length=8, preset="standard", observe=seen.append
    )
    assert [step.t for step in seen] == pytest.approx(
        [1 - (7 / 8) ** 2, 1 - (5 / 8) ** 2, 1 - (3 / 8) ** 2, 1 - 1 / 64]
    )
    assert grid_by_name("late", 1, Linear()).tolist() == [0.75]
    assert samples.settings["solver"] == "adams" and samples.nfe == 4
    with pytest.raises(UserError, match="did you mean 'adams'"):
        cf.Settings(solver="adms")
    controls = cf.Controls(refine=1, scg=3.0, scg_schedule="window")
    plan = cf.Settings(nfe=16, controls=controls).plan(Linear())
    # gamma = 2 log((1 - t)/t) is at most 4 from t = 0.119 on: all of eight midpoints but the first.
    assert plan.w_scg == [0.0] + [3.0] * 7
    with pytest.raises(UserError, match="did you mean 'window'"):
        cf.Controls(ug_schedule="windw")


def test_a_corpus_is_prepared_by_its_name(other_package: Path, tmp_path: Path) -> None:
    corpus = prepare("counting", tmp_path / "corpus", tokenizer="byte", length=16)
    assert corpus.name == "counting"
    assert corpus.tokenizer.decode(corpus.train[0].tolist()) == "One, two, three."
    assert corpus.tokenizer.decode(corpus.heldout[0].tolist()).startswith("One, two.")


def test_a_scorer_judges_by_its_name(other_package: Path) -> None:
    model = cf.load("stories-small", device="cpu")
    samples = model.generate(2, nfe=2)
    record = cf.evaluate(samples, tokenizer=model.tokenizer, scorer="zip")
    assert samples.texts is not None
    nats = [8 * math.log(2) * len(zlib.compress(text.encode(), 9)) for text in samples.texts]
    assert record["scorer"] == "zip"
    assert record["gen_ppl"] == pytest.approx(math.exp(np.sum(nats) / samples.ids.numel()), rel=0.05)


def test_naming_systems_loads_nothing_heavy(other_package: Path) -> None:
    code = (
        "import sys; from convergeflow.systems import METHODS; assert 'bigram' in list(METHODS);"
        "from convergeflow.training.recipes import recipes; recipes();"
        "heavy = {'torch', 'numpy', 'pydantic', 'workshop'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    paths = [str(other_package), str(Path(__file__).resolve().parent.parent / "src")]
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


def test_unknown_names_and_two_owners_are_refused(other_package: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'bigram'"):
        METHODS["bigrm"]
    info = other_package / "another-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[convergeflow.toys]\nball = a:b\n")
    third = other_package / "third-1.0.dist-info"
    third.mkdir()
    (third / "METADATA").write_text("Metadata-Version: 2.1\nName: third\nVersion: 1.0\n")
    (third / "entry_points.txt").write_text("[convergeflow.toys]\nball = c:d\n")
    scanned.cache_clear()  # packages that come while a process runs are not seen before the next one
    with pytest.raises(UserError, match="two packages register the toy 'ball': a:b and c:d"):
        Registry[object]("toy", "toys", {})["ball"]


def test_packages_are_scanned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scans: list[int] = []
    real = metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda **which: (scans.append(1), real(**which))[1])
    scanned.cache_clear()
    for registry in (METHODS, SOLVERS, GRIDS, CORPORA):
        assert "nothing of this name" not in registry and list(registry)
    assert len(scans) == 1
