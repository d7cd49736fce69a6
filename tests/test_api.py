"""The public interface: its names and parameters are frozen, importing it is cheap, its page's examples run.

`tests/api.txt` is the frozen list. After a change that is meant: python tests/test_api.py > tests/api.txt
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

import convergeflow as cf

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
FROZEN = ROOT / "tests" / "api.txt"
EXAMPLE = re.compile(r"^```python runnable\n(.*?)^```", re.MULTILINE | re.DOTALL)


def parameters(function: Any) -> str:
    """Names, kinds and defaults, without annotations."""
    signature = inspect.signature(function)
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def described(name: str) -> str:
    thing = getattr(cf, name)
    if inspect.isfunction(thing) or is_dataclass(thing):
        return name + parameters(thing)
    return name


def listed() -> list[str]:
    """The interface as text, one name a line; the model that users hold is part of it."""
    from convergeflow.systems.convergeflow import ConvergeFlowModel

    lines = [described(name) for name in sorted(cf.__all__)]
    methods = ("bound", "finetune", "generate", "push_to_hub")
    return [*lines, *(f"model.{name}{parameters(getattr(ConvergeFlowModel, name))}" for name in methods)]


def test_names_and_parameters_are_the_frozen_ones() -> None:
    assert listed() == FROZEN.read_text(encoding="utf-8").splitlines(), (
        "the public interface changed: if that is meant, run python tests/test_api.py > tests/api.txt and say so in "
        "CHANGELOG.md"
    )


def test_every_name_has_a_home_and_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in cf.__all__:
        assert getattr(cf, name) is not None
        assert name == "__version__" or f"`cf.{name}`" in page, f"docs/api.md does not explain cf.{name}"
        assert name in dir(cf)
    for name in re.findall(r"\bcf\.(\w+)", page):
        assert name in cf.__all__, f"docs/api.md uses cf.{name}"
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        cf.lode  # noqa: B018


def test_every_public_thing_says_what_it_is() -> None:
    for name in cf.__all__:
        if name != "__version__":
            assert len(inspect.getdoc(getattr(cf, name)) or "") > 20, name


def test_importing_loads_nothing_heavy() -> None:
    """Not even naming the functions does; the first class that needs torch loads it."""
    code = (
        "import sys, convergeflow as cf\n"
        "cf.load, cf.preset, cf.train, cf.evaluate, cf.UserError, cf.__version__, dir(cf)\n"
        "heavy = {'torch', 'numpy', 'transformers', 'accelerate', 'pydantic', 'matplotlib', 'scipy', 'rich', 'typer'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "cf.Samples\n"
        "assert 'torch' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_types_are_visible_to_a_checker(tmp_path: Path) -> None:
    """A user's program is checked against the package: right uses pass, a wrong name and a wrong type do not."""
    mypy = pytest.importorskip("mypy.api")
    program = tmp_path / "user.py"
    program.write_text(
        "import convergeflow as cf\n"
        "settings: cf.Settings = cf.preset('sharp', cf.load('stories-small'), nfe=8)\n"
        "value: float = settings.temperature\n"
        "cf.lode('x')\n"
        "cf.preset(3)\n"
    )
    found, _, _ = mypy.run(["--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), str(program)])
    errors = re.findall(r"user\.py:(\d+): error: (.*)", found)
    assert [line for line, _ in errors] == ["4", "5"], found


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path / "cache"))
    examples = EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))
    assert len(examples) > 8
    names: dict[str, Any] = {}
    for number, example in enumerate(examples):
        exec(compile(example, f"docs/api.md, example {number}", "exec"), names)
    assert (tmp_path / "trace" / "trace.png").is_file()
    assert names["record"]["n"] == 8
    assert names["record"]["model"]["weights"] == "42c1411eb6f7d4f4"
    assert names["again"]["n"] == 1
    assert names["plan"].allocation.nfe == 20


def test_a_sample_is_its_seeds_alone_and_the_commands() -> None:
    model = cf.load("stories-small")
    settings = cf.Settings(nfe=6)
    both = model.generate(num=2, seed=4, settings=settings)
    second = model.generate(num=1, seed=5, settings=settings)
    assert both.ids[1].tolist() == second.ids[0].tolist()
    assert both.nfe == 6
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "convergeflow",
            "generate",
            "--num",
            "1",
            "--seed",
            "5",
            "--nfe",
            "6",
            "--preset",
            "standard",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert second.texts is not None
    assert done.stdout.strip().endswith(second.texts[0].strip())


def test_presets_are_fitted_to_a_model() -> None:
    model = cf.load("stories-small")
    paper, fitted = cf.preset("config-c"), cf.preset("config-c", model)
    assert (paper.controls.refine, paper.controls.scg) == (100, 30.0)
    effective = fitted.plan(model.schedule).w_scg[-1]  # type: ignore[attr-defined]
    there = paper.plan(cf.Gumbel(4.9563, 0.9637)).w_scg[-1]
    assert fitted.controls.scg != paper.controls.scg
    assert effective == pytest.approx(there, rel=0.35), "the last grid points differ a little, nominal values much more"
    with pytest.raises(cf.UserError, match="did you mean 'sharp'"):
        cf.preset("shrap")


def test_training_overrides_and_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path / "cache"))
    changes: dict[str, Any] = {
        "corpus": {"blocks": 64, "heldout_blocks": 16},
        "batch": 4,
        "evaluate_blocks": 4,
        "model": {"schedule": {"scale": 0.7}},
    }
    stages = {"ce": {"steps": 5}, "mse": {"steps": 1}}
    model = cf.train("test", out=tmp_path / "run", stages=stages, **changes)
    assert cf.load(tmp_path / "run").method == model.method == "convergeflow"
    with pytest.raises(cf.UserError, match="already holds a run"):
        cf.train("test", out=tmp_path / "run", stages=stages, **changes)
    with pytest.raises(cf.UserError, match="did you mean 'batch'"):
        cf.train("test", out=tmp_path / "other", bacth=4)
    longer = {"ce": {"steps": 5}, "mse": {"steps": 2}}
    cf.train("test", out=tmp_path / "run", resume=True, stages=longer, **changes)
    steps = [line for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines() if '"step": 7' in line]
    assert steps, "the run went on to its seventh step"


def test_evaluate_refuses_what_has_no_single_record() -> None:
    with pytest.raises(cf.UserError, match="one protocol"):
        cf.evaluate("stories-small", protocol="all")


if __name__ == "__main__":
    print("\n".join(listed()))
