"""Other packages add systems, schedules, solvers, grids and scorers by entry points alone, without a line of this one.

`tests/data/test_prepare.py` does the same for a corpus.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import convergeflow as cf
from convergeflow.errors import UserError
from convergeflow.evaluation.scorers import SCORERS
from convergeflow.flow import GRIDS, SOLVERS
from convergeflow.flow.schedule import SCHEDULES, schedule_from
from convergeflow.plugins import Registry
from convergeflow.systems import METHODS, class_of_type
from convergeflow.training.build import build_model
from convergeflow.training.config import resolve
from convergeflow.zoo import load_model

SOURCE = '''
from dataclasses import dataclass

import numpy as np
import torch

from convergeflow.evaluation.scorers import Scored
from convergeflow.flow.schedule import Coefficients, Linear
from convergeflow.flow.solver import Solver
from convergeflow.objective.losses import Loss
from convergeflow.systems.rival import Rival, RivalConfig, TokenNetwork


@dataclass(frozen=True)
class GuessConfig(RivalConfig):
    lucky_number: int = 3


class GuessModel(Rival):
    """Writes one token again and again."""

    method = "guess"
    config_class = GuessConfig

    def __init__(self, config):
        super().__init__(config)
        self.network = TokenNetwork(config, inputs=config.vocabulary, outputs=config.vocabulary)

    def row_losses(self, tokens, times, draws):
        return self.network(tokens, times).square().mean((1, 2))

    def generate_batch(self, run):
        return torch.full((run.rows, run.length), self.config.lucky_number)


@dataclass(frozen=True)
class Quadratic(Linear):
    power: float = 2.0

    def __call__(self, t):
        t = torch.as_tensor(t, dtype=torch.float64) ** self.power
        return Coefficients(t, 1.0 - t)

    def describe(self):
        return {"kind": "quadratic", "power": self.power}


class Lazy(Solver):
    """Stays where it is."""

    def advance(self, x, mu, now, then, w_ug=0.0, history=None):
        return x


LAZY = Lazy()


def even_grid(num_steps, schedule):
    return torch.linspace(0.1, 0.9, num_steps + 1, dtype=torch.float64)


class TwoNats:
    """Gives every token 2 nats."""

    name = "two-nats"

    def __init__(self, device, batch, say):
        say(f"{self.name} is ready")

    def score(self, texts, protocol, progress=None):
        tokens = np.full(len(texts.ids), texts.ids.shape[1])
        return Scored(2.0 * tokens, tokens)

    def describe(self):
        return {"name": self.name}

    def arithmetic(self, protocol):
        return "float64"
'''


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "guesswork.py").write_text(SOURCE)
    info = tmp_path / "guesswork-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guesswork\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[convergeflow.systems]\nguess = guesswork:GuessModel\n"
        "[convergeflow.schedules]\nquadratic = guesswork:Quadratic\n"
        "[convergeflow.solvers]\nlazy = guesswork:LAZY\n"
        "[convergeflow.grids]\neven = guesswork:even_grid\n"
        "[convergeflow.scorers]\ntwo-nats = guesswork:TwoNats\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    # What a registry has loaded it keeps; these must forget it again.
    for registry in (METHODS, SCHEDULES, SOLVERS, GRIDS, SCORERS):
        monkeypatch.setattr(registry, "_known", dict(registry._known))
    return tmp_path


def test_a_system_is_named_configured_built_saved_and_loaded(other_package: Path, tmp_path: Path) -> None:
    assert "guess" in METHODS and list(METHODS)[-1] == "guess"
    config = resolve("test", ["model.method=guess", "model.lucky_number=5"])
    model = build_model(config, 11)
    assert model.generate(2, length=4).ids.tolist() == [[5] * 4] * 2
    with pytest.raises(UserError, match=r"did you mean 'model\.lucky_number'"):
        resolve("test", ["model.method=guess", "model.lucky_numbr=5"])
    model.save_pretrained(tmp_path / "saved")
    assert class_of_type("convergeflow-guess") is type(model)
    assert load_model(tmp_path / "saved", device="cpu").config == model.config


def test_a_schedule_is_used_by_its_kind(other_package: Path) -> None:
    schedule = schedule_from({"kind": "quadratic", "power": 3.0})
    assert float(schedule(torch.tensor(0.5)).alpha) == 0.125
    model = build_model(resolve("test", ["model.schedule.kind=quadratic", "model.schedule.power=3"]), 11)
    assert model.as_flow().schedule == schedule  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"did you mean 'model\.schedule\.power'"):
        resolve("test", ["model.schedule.kind=quadratic", "model.schedule.powr=3"])


def test_a_solver_and_a_grid_are_settings_by_their_names(other_package: Path) -> None:
    model = cf.load("stories-small", device="cpu")
    seen: list[cf.Step] = []
    settings = cf.Settings(nfe=4, solver="lazy", grid="even", controls=cf.Controls(refine=0))
    samples = model.generate(settings=settings, length=8, observe=seen.append)
    assert [step.t for step in seen] == pytest.approx([0.1, 0.3, 0.5, 0.7])
    assert all(torch.equal(step.x_t, seen[0].x_t) for step in seen), "the lazy solver stays where it is"
    assert samples.settings["solver"] == "lazy" and samples.nfe == 4
    with pytest.raises(UserError, match="did you mean 'lazy'"):
        cf.Settings(solver="lzy")


def test_a_scorer_judges_by_its_name(other_package: Path) -> None:
    model = cf.load("stories-small", device="cpu")
    samples = model.generate(2, settings=cf.Settings(nfe=2))
    record = cf.evaluate(samples, tokenizer=model.tokenizer, scorer="two-nats")
    assert record["gen_ppl"] == pytest.approx(math.exp(2)) and record["scorer"] == "two-nats"


def test_naming_systems_loads_nothing_heavy(other_package: Path) -> None:
    code = (
        "import sys; from convergeflow.systems import METHODS; assert 'guess' in list(METHODS);"
        "from convergeflow.training.recipes import recipes; recipes();"
        "heavy = {'torch', 'numpy', 'pydantic', 'guesswork'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    paths = [str(other_package), str(Path(__file__).resolve().parent.parent / "src")]
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


def test_unknown_names_and_two_owners_are_refused(other_package: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'guess'"):
        METHODS["gues"]
    info = other_package / "another-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[convergeflow.toys]\nball = a:b\n")
    third = other_package / "third-1.0.dist-info"
    third.mkdir()
    (third / "METADATA").write_text("Metadata-Version: 2.1\nName: third\nVersion: 1.0\n")
    (third / "entry_points.txt").write_text("[convergeflow.toys]\nball = c:d\n")
    with pytest.raises(UserError, match="two packages register the toy 'ball': a:b and c:d"):
        Registry[object]("toy", "toys", {})["ball"]
