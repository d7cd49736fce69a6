"""The bench command on sizes that take a moment: records, pictures and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from convergeflow.benchmarks import head, measure, models, prepare, sample, scaling, score, startup, train
from convergeflow.cli.main import main
from convergeflow.errors import ConvergeFlowError
from convergeflow.evaluation.scorers import CausalScorer, ExactScorer

TINY = models.Size(32, 2, 2, 61, 12, sample_batch=3, train_batch=4, self_condition=0.5)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {"head": head.memory, "sample": sample.memory, "train": train.memory}
    monkeypatch.setattr(measure, "in_fresh_process", lambda job, **arguments: jobs[job](**arguments))
    monkeypatch.setattr(measure, "GEMM_SIDE", 32)
    monkeypatch.setitem(head.SHAPES, "small", head.HeadSize(40, 16, 70))
    monkeypatch.setitem(models.SIZES, "small", TINY)
    point = {"axis": "vocabulary", "seconds": {"plain": 2.0, "ours": 1.0}}
    monkeypatch.setattr(scaling, "points", lambda what: [{**point, "value": 8}, {**point, "value": 16}])


@pytest.mark.parametrize("what", ["head", "sample", "train"])
def test_a_record_and_its_picture(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", what, "--repeats", "1", "--threads", "1", "--scaling", "--json", "--out", str(tmp_path)]
    assert main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / f"{what}-small.json").read_text())
    assert printed["what"] == what and len(printed["scaling"]) == 2
    assert (tmp_path / f"{what}-small.png").stat().st_size > 1000


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "head", "--repeats", "1", "--threads", "1"]) == 0
    shown = capsys.readouterr().out
    assert "speedup_vs_plain_float32" in shown and "gemm_peak_fraction" in shown


def test_start_up_is_compared_with_importing_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first round warms the file cache and is not counted; then 4, 1, 6, 2, ... for each case in turn.
    spent = iter([99.0, 99.0, 99.0, 4.0, 1.0, 6.0, 8.0, 3.0, 8.0, 5.0, 2.0, 30.0])
    monkeypatch.setattr(startup, "processor_seconds", lambda arguments: next(spent))
    assert main(["bench", "startup", "--repeats", "3", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["seconds"] == {"torch": 5.0, "list": 2.0, "generate": 8.0}
    assert (record["list_vs_torch"], record["generate_vs_torch"]) == (0.4, 1.6)


def test_a_process_is_charged_for_what_it_computes() -> None:
    idle, busy = (startup.processor_seconds(["-c", code]) for code in ("", "sum(range(30_000_000))"))
    assert 0 < idle < busy
    with pytest.raises(ConvergeFlowError, match="exit code 3"):
        startup.processor_seconds(["-c", "raise SystemExit(3)"])


@pytest.mark.parametrize("arguments", [["--size", "huge"], ["--threads", "100000"], ["--repeats", "0"]])
def test_mistakes_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "head", *arguments]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_preparing_is_timed_on_one_core_and_on_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"Document {number} has some words, {number} of them." for number in range(2000)]
    monkeypatch.setattr(prepare, "documents", lambda size: iter(texts))
    monkeypatch.setattr(prepare, "TOKENIZER", "byte")
    assert main(["bench", "prepare", "--workers", "2", "--json", "--out", str(tmp_path)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "prepare-gpt2.json").read_text())
    text_bytes = sum(map(len, texts))
    assert record["megabytes"] == text_bytes / 1e6
    assert record["bytes_per_token"] == pytest.approx(text_bytes / (text_bytes + len(texts)), abs=0.05)
    for case in (record["workers_1"], record["workers_2"]):
        assert case["MB_per_second"] == pytest.approx(text_bytes / 1e6 / case["seconds"])
        assert case["MB_per_processor_second"] > 0
    assert record["reached"] == (record["MB_per_second_of_two_free_cores"] >= 4.0)


def test_everything_on_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "all", "--device", "cpu", "--repeats", "1", "--out", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "all-cpu-small.json").read_text())
    shown = capsys.readouterr().out
    assert len(stored["verdict"]) == 3 and all(line in shown for line in stored["verdict"])
    assert main(["bench", "all", "--device", "gpu"]) == 2
    assert "unknown device 'gpu'" in capsys.readouterr().err


def test_predictions_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "roofline", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["met"] == {"sampling_ms_per_sequence_and_call": True, "training_us_per_token": True}


def test_a_scorer_reads_with_both_libraries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=31, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
    )
    scorer = CausalScorer("tiny", network, None, start_id=0, end_id=0, weights="tiny")
    monkeypatch.setattr(score, "scorer_named", lambda name, device: scorer)
    assert main(["bench", "score", "--scorer", "tiny", "--repeats", "1", "--json", "--out", str(tmp_path)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "score-tiny.json").read_text())
    assert record["processor_quick_over_default"] > 0 and record["largest_difference_of_a_logit"] < 1e-4
    monkeypatch.setattr(score, "scorer_named", lambda name, device: ExactScorer())
    assert main(["bench", "score", "--scorer", "exact"]) == 2
    assert "makes no network calls" in capsys.readouterr().err
