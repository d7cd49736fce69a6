"""`convergeflow import`: a folder that loads, a clear report, and nothing left behind by a failure."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch

from convergeflow.cli.main import main
from convergeflow.data.tokenizer import Tokenizer

TINY = Path(__file__).resolve().parent.parent / "golden" / "langflow_tiny"


def test_langflow_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from convergeflow.systems.convergeflow import ConvergeFlowModel

    out = tmp_path / "models" / "tiny"
    assert main(["import", "langflow", str(TINY), "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["vocabulary"], record["width"], record["depth"], record["heads"]) == (211, 64, 2, 4)
    assert record["tokenizer"] is False
    model = ConvergeFlowModel.from_pretrained(out)
    assert model.config.schedule["loc"] == pytest.approx(4.9563, abs=1e-6)
    assert (out / "card.md").is_file()
    assert [entry.name for entry in out.parent.iterdir()] == ["tiny"]


def word_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer of exactly `size` words, as another project would ship it."""
    words = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, size)}}
    pipeline = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    folder.mkdir(exist_ok=True)
    pipeline.save(str(folder / "tokenizer.json"))


def test_a_tokenizer_beside_the_weights_comes_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(shutil.copytree(TINY, tmp_path / "source"))
    word_tokenizer(source, 211)
    assert main(["import", "langflow", str(source), "--out", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokenizer"] is True
    assert Tokenizer.load(tmp_path / "out").size == 211
    assert main(["import", "langflow", str(source), "--tokenizer", "none", "--out", str(tmp_path / "bare")]) == 0
    assert not (tmp_path / "bare" / "tokenizer.json").exists()


def test_a_tokenizer_of_another_size_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    word_tokenizer(tmp_path / "words", 210)
    words = ["import", "langflow", str(TINY), "--tokenizer", str(tmp_path / "words"), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert "has 210 tokens, the model 211" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_published_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    weights = load_file(TINY / "model.safetensors")
    torch.save({"model": weights, "ema": weights}, tmp_path / "a.pt")
    words = ["import", "convergeflow", str(tmp_path / "a.pt"), "--weights", "raw", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert "2 layers" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["length"] == 1024


def test_failures_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(shutil.copytree(TINY, tmp_path / "source"))
    (source / "model.safetensors").write_bytes(b"short")
    assert main(["import", "langflow", str(source), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["source"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    assert main(["import", "langflow", str(TINY), "--out", str(tmp_path / "out")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "out" / "precious").read_text() == "mine"


def test_a_wrong_choice_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["import", "convergeflow", "a.pt", "--weights", "rwa", "--out", str(tmp_path / "x")])
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1)
    assert "did you mean raw?" in err
