"""`convergeflow distill` as a run: the configuration from a teacher, exact resume, and mistakes in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from convergeflow.cli.main import main
from convergeflow.distillation.run import build_student, configuration
from convergeflow.errors import UserError
from convergeflow.systems.convergeflow import ConvergeFlowModel
from convergeflow.training import run
from convergeflow.training.build import build_model, introduce, open_corpus
from convergeflow.training.checkpoint import write_json
from convergeflow.training.config import RunConfig, resolve
from convergeflow.zoo import load_model

SMALL = [
    "stages.0.steps=6",
    "stages.0.warmup=1",
    "batch=2",
    "checkpoint_every=2",
    "evaluate_every=3",
    "evaluate_blocks=2",
]
SAMPLED = ["distill.sampling={nfe: 4}", "distill.calls=[1, 2]", "sample_every=0", "sample_nfe=2"]


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONVERGEFLOW_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a training run leaves it."""
    folder = tmp_path_factory.mktemp("teacher")
    config = resolve("test")
    corpus = open_corpus(config)
    model = build_model(config, corpus.vocabulary)
    introduce(model, corpus, config)
    model.save_pretrained(folder)
    corpus.tokenizer.save(folder)
    write_json(folder / "run.json", config.to_dict())
    return folder


def settled(teacher: Path, *changes: str) -> RunConfig:
    return configuration(str(teacher), overrides=[*SMALL, *SAMPLED, *changes])


def test_the_configuration_is_the_teachers_network_and_text(teacher: Path) -> None:
    config = settled(teacher)
    there = load_model(teacher).config
    assert config.model.system.width == there.width and config.model.system.schedule == there.schedule
    assert (config.corpus.name, config.corpus.length, config.corpus.blocks) == ("stories", 32, 2000)
    assert config.distill is not None and config.distill.teacher == str(teacher) and config.distill.weights
    student = build_student(config, there.vocabulary)
    assert student.config.preset == "swift"
    assert all(torch.equal(a, b) for a, b in zip(student.parameters(), load_model(teacher).parameters(), strict=True))


def test_a_stopped_run_goes_on_bit_for_bit(teacher: Path, tmp_path: Path) -> None:
    config = settled(teacher)
    for name in ("whole", "parts"):
        assert run.train(config, tmp_path / name, build=build_student).finished
    journals = [tmp_path / name / "journal.jsonl" for name in ("whole", "parts")]
    # As if it had been killed after step 4.
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-00000006")
    shutil.rmtree(tmp_path / "parts" / "model")
    end = run.train(run.saved_config(tmp_path / "parts"), tmp_path / "parts", resume=True, build=build_student)
    assert end.finished and end.step == 6
    models = [load_model(tmp_path / name) for name in ("whole", "parts")]
    assert all(type(model) is ConvergeFlowModel and model.config.preset == "swift" for model in models)
    both = [model.state_dict() for model in models]
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])
    assert journals[0].read_bytes() == journals[1].read_bytes()
    card = (tmp_path / "whole" / "model" / "card.md").read_text()
    assert f"student of {teacher}" in card and "ce@2" in card


def test_the_command_trains_and_the_student_is_an_ordinary_model(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "swift"
    assert main(["distill", str(teacher), *SMALL, *SAMPLED, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"]
    journal = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    assert {"mse", "ce", "loss"} <= set(next(line for line in journal if line.get("step") == 1))
    assert main(["generate", "--model", str(out), "--num", "1", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["nfe"] == 8 and made["samples"][0]["settings"]["self_condition"] == "previous"
    assert main(["train", "--out", str(out), "--resume"]) == 2
    assert "convergeflow distill" in capsys.readouterr().err
    assert main(["distill", "--out", str(out), "--resume", "stages.0.steps=7"]) == 0


def test_a_student_can_start_from_another(teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With rates next to zero nothing is learned: what comes out is what it began with, which is not the teacher."""
    first, second = tmp_path / "first", tmp_path / "second"
    words = [str(teacher), *SMALL, *SAMPLED, "ema.decay=0.0"]
    still = ["stages.0.lr=1e-30", "stages.0.matrix_lr=1e-30"]
    assert main(["distill", *words, "--out", str(first)]) == 0
    assert main(["distill", *words, *still, "--init-from", str(first), "--out", str(second)]) == 0
    begun, found, taught = (load_model(folder).state_dict() for folder in (first, second, teacher))
    torch.testing.assert_close(found, begun, rtol=0, atol=1e-20)
    assert any(not torch.allclose(found[name], taught[name], rtol=0, atol=1e-20) for name in taught)
    assert main(["distill", *words, "--init-from", "nowhere", "--out", str(tmp_path / "third")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_dry_run_says_what_it_costs(teacher: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["distill", str(teacher), *SMALL, *SAMPLED, "--dry-run", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["estimate"]["total_seconds"] > 0 and shown["config"]["distill"]["calls"] == [1, 2]
    assert main(["distill", str(teacher), *SMALL, *SAMPLED, "--dry-run"]) == 0
    assert "the teacher" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["distill"], "name the teacher first"),
        (["distill", "stories-smal"], "did you mean 'stories-small'"),
        (["distill", "stories-ar"], "must be a flow"),
        (["distill", "stories-direct"], "weights over the token table"),
        (["distill", "stories-small", "distill.cals=[4]"], "did you mean 'distill.calls'"),
        (["distill", "stories-small", "distill.sampling={preset: standard-text}"], "distill.sampling"),
        (["distill", "stories-small", "--recipe", "stories"], "a recipe for `convergeflow train`"),
        (["train", "swift"], "convergeflow distill"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err


def test_another_teacher_or_another_text_is_refused(teacher: Path, tmp_path: Path) -> None:
    config = settled(teacher)
    assert config.distill is not None
    other = config.model_copy(update={"distill": config.distill.model_copy(update={"weights": "0" * 16})})
    with pytest.raises(UserError, match="other weights"):
        build_student(other, 20)
    with pytest.raises(UserError, match=r"corpus\.name="):
        build_student(config, 20)
    load_model(teacher).save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="does not say what its text was"):
        configuration(str(tmp_path / "bare"))
