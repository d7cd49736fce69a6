"""What the tests of faults share: a tiny model, a tiny corpus in a cache of its own, and a run that can be copied."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_run import RECIPE, Outcome, run

from convergeflow.cli.main import main

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults-cache")


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(cache))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few thousand weights without a tokenizer."""
    folder = tmp_path_factory.mktemp("faults-model") / "tiny"
    assert main(["import", "langflow", str(GOLDEN / "langflow_tiny"), "--out", str(folder), "--tokenizer", "none"]) == 0
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A finished run of four steps with two checkpoints; tests take copies."""
    out = tmp_path_factory.mktemp("faults-run") / "run"
    before = os.environ.get("CONVERGEFLOW_CACHE")
    os.environ["CONVERGEFLOW_CACHE"] = str(cache)
    try:
        assert main(["train", *RECIPE, "--out", str(out)]) == 0
    finally:
        os.environ.pop("CONVERGEFLOW_CACHE") if before is None else os.environ.update(CONVERGEFLOW_CACHE=before)
    return out


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Outcome]]:
    """Runs a command in this process: its exit code and what it said."""
    yield lambda *words: run(capsys, *words)
