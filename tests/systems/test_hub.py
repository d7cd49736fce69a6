"""The hub is asked once: where it does not answer, what is here is used, and nobody waits for five tries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants, errors, hf_api
from huggingface_hub.utils import _http

from convergeflow.cli.main import main
from convergeflow.errors import ConvergeFlowError
from convergeflow.evaluation.scorers import scorer_named
from convergeflow.systems.hub import asked_once, hub_folder, without_network


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every attempt to reach the hub, none of which arrives."""
    made: list[str] = []

    class Deaf:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __getattr__(self, name: str) -> Any:
            def attempt(method: str, url: str = "", **_: Any) -> Any:
                if "agent-harnesses" not in url + method:  # the client has a question of its own
                    made.append(url or method)
                raise OSError("no such host")

            return attempt

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for module in (hf_api, _http):
        monkeypatch.setattr(module, "get_session", Deaf)
    return made


def test_a_hub_that_does_not_answer_is_asked_once(tries: list[str]) -> None:
    with pytest.raises(ConvergeFlowError, match="nobody/nothing is not on this machine"):
        hub_folder("nobody/nothing")
    assert len(tries) == 1
    with pytest.raises(ConvergeFlowError, match="the scorer nobody/nothing is not on this machine"):
        scorer_named("nobody/nothing", device="cpu")
    assert len(tries) == 2


def test_a_refusal_is_an_answer(monkeypatch: pytest.MonkeyPatch, tries: list[str]) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise errors.RepositoryNotFoundError.__new__(errors.RepositoryNotFoundError)

    monkeypatch.setattr(HfApi, "model_info", refuse)
    assert asked_once("nobody/nothing") == {}


def test_nobody_is_asked_where_the_network_is_barred(tries: list[str]) -> None:
    with without_network():
        assert asked_once("nobody/nothing") == {"local_files_only": True}
    assert tries == []


def test_a_dry_run_fetches_nothing(
    tries: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert main(["compare", "--checkpoints", "table1", "--dry-run", "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "--dry-run fetches nothing" in told and tries == []
