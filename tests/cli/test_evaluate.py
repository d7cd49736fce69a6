"""`convergeflow evaluate` end to end on a tiny model: records, files, protocols, mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import convergeflow
from convergeflow.cli.main import main
from convergeflow.data.tokenizer import Tokenizer, byte_tokenizer
from convergeflow.errors import UserError
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))

import scorer_stand_ins
from tiny_model import saved_word_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_word_model(tmp_path_factory.mktemp("evaluate") / "words")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path / "cache"))


def test_json_record_of_a_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    arguments = ["evaluate", str(model), "--num", "8", "--nfe", "6", "--bound", "2", "--json", "--out", str(out)]
    assert main(arguments) == 0
    record = json.loads(capsys.readouterr().out)
    assert {"gen_ppl", "gen_ppl_se", "entropy", "entropy_se", "n", "nfe", "protocol", "valid"} <= set(record)
    assert record["n"] == 8 and record["nfe"] == 6 and record["protocol"] == "ours-1" and record["scorer"] == "exact"
    assert record["gen_ppl"] > record["real"]["gen_ppl"] and record["likelihood"]["kl_at_most"] > 0
    assert record["model"]["method"] == "convergeflow" and len(record["model"]["weights"]) == 16
    assert json.loads(out.read_text()) == record
    assert main(["inspect", str(out)]) == 0
    assert "Gen. PPL" in capsys.readouterr().out


def test_a_sample_file_scores_like_the_samples_themselves(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "samples.jsonl"
    assert main(["evaluate", str(model), "--num", "6", "--nfe", "4", "--keep", str(kept), "--json"]) == 0
    direct = json.loads(capsys.readouterr().out)
    assert main(["evaluate", "--samples", str(kept), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["gen_ppl"] == direct["gen_ppl"] and again["model"]["weights"] == direct["model"]["weights"]
    assert again["nfe"] == 4 and again["sampling"] == direct["sampling"]
    assert main(["evaluate", "--samples", str(kept), "--num", "7"]) == 2
    assert "holds 6 samples" in capsys.readouterr().err


def test_all_protocols_in_one_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scorer = scorer_stand_ins.random_gpt2(tmp_path / "gpt2")
    kept = tmp_path / "samples.jsonl"
    assert main(["generate", "--model", str(model), "--num", "3", "--nfe", "2", "--out", str(kept)]) == 0
    capsys.readouterr()
    arguments = ["evaluate", "--samples", str(kept), "--scorer", str(scorer), "--protocol", "all"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for name in ("ours-1", "convergeflow-2026", "langflow-2026", "duo-2026", "elf-2026"):
        assert name in text
    assert main([*arguments, "--json"]) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    assert len({record["gen_ppl"] for record in records}) >= 4


def test_the_overlap_can_be_left_out_and_a_large_text_is_indexed_once(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convergeflow.evaluation.overlap.SMALL", 100)
    assert main(["prepare", "--blocks", "60", "--heldout-blocks", "20", "--out", str(tmp_path / "corpus")]) == 0
    arguments = ["evaluate", str(model), "--num", "4", "--nfe", "2", "--json", "--corpus", str(tmp_path / "corpus")]
    shown = []
    for more in ([], [], ["--no-overlap"]):
        capsys.readouterr()
        assert main([*arguments, *more]) == 0
        shown.append(capsys.readouterr())
    records = [json.loads(each.out) for each in shown]
    assert ["indexed once" in each.err for each in shown] == [True, False, False]
    assert ["training_overlap_8" in record["metrics"] for record in records] == [True, True, False]
    assert records[0]["metrics"] == records[1]["metrics"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--protocol", "duo"], "did you mean 'duo-2026'"),
        (["--scorer", "exakt"], "did you mean 'exact'"),
        (["--set", "temperature=0.9"], "has no control 'temperature'"),
        (["--corpus", "sotu"], "convergeflow prepare sotu"),
        (["--nfe", "0"], "nfe"),
    ],
)
def test_mistakes_are_one_line(
    model: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(model), "--num", "2", "--nfe", "2", *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("error: ") and expected.lower() in said[-1].lower()


def test_options_without_effect_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--nfe", "--length", "--seed", "--batch"):
        assert main(["evaluate", "--samples", str(tmp_path / "x.jsonl"), option, "8"]) == 2
        assert f"{option} has no effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--scorer", "exakt"], "did you mean 'exact'"),
        (["--scorer", "smollm2"], "convergeflow fetch smollm2"),
        (["--scorer", "."], "does not hold a causal language model"),
        (["--scorer", "exact", "--protocol", "duo-2026"], "knows ours-1 only"),
    ],
)
@pytest.mark.parametrize("command", [["evaluate"], ["sweep", "--values", "1,2"], ["tune", "--calls", "4"]])
def test_a_scorer_is_looked_at_before_anything_is_sampled(
    model: Path,
    tmp_path: Path,
    command: list[str],
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ConvergeFlowModel, "sample", not_yet)
    assert main([command[0], str(model), *command[1:], "--num", "2", *arguments]) == 2
    assert expected in capsys.readouterr().err.strip().splitlines()[-1]


def not_yet(*asked: object, **how: object) -> None:
    raise AssertionError("sampled before everything else was looked at")


@pytest.mark.parametrize(
    ("tokenizer", "arguments", "expected"),
    [
        (byte_tokenizer(), ["--scorer", "exact"], "outside its vocabulary"),
        (None, ["--scorer", "{gpt2}"], "ids only"),
        (byte_tokenizer(), ["--scorer", "{gpt2}", "--bound", "1"], "needs held-out text"),
    ],
)
def test_what_no_corpus_can_tell_is_asked_of_the_scorer_before_anything_is_sampled(
    tmp_path: Path,
    tokenizer: Tokenizer | None,
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpt2 = scorer_stand_ins.random_gpt2(tmp_path / "gpt2")
    model = ConvergeFlowModel(ConvergeFlowConfig(vocabulary=257, width=32, depth=1, heads=1, length=16))
    model.tokenizer = tokenizer
    model.save_pretrained(tmp_path / "bytes")
    monkeypatch.setattr(ConvergeFlowModel, "sample", not_yet)
    words = [word.format(gpt2=gpt2) for word in arguments]
    assert main(["evaluate", str(tmp_path / "bytes"), "--num", "2", *words]) == 2
    assert expected in capsys.readouterr().err.strip().splitlines()[-1]


def test_python_looks_at_the_scorer_first_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ConvergeFlowModel, "sample", not_yet)
        for scorer, protocol in (("smollm2", "ours-1"), ("exact", "duo-2026")):
            with pytest.raises(UserError, match=r"convergeflow fetch smollm2|knows ours-1 only"):
                convergeflow.evaluate(model, num=2, scorer=scorer, protocol=protocol)
        for wrong in ({"num": 0}, {"length": 0}):
            with pytest.raises(UserError, match="at least 1"):
                convergeflow.evaluate(model, **wrong)
    assert convergeflow.evaluate(model, num=2, nfe=2, prompt="the fox", length=12)["length"] == 12
