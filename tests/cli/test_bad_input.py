"""Wrong input of every kind: one clear line on stderr, nothing on stdout, exit code 2 (or 1), no traceback.

The same rule for every command, so the cases are a table. `{...}` stands for a file or folder of the fixture.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy
import pytest

from convergeflow.cli import main as command_line

GOLDEN = Path(__file__).resolve().parent.parent / "golden"

TEXT = "Once upon a time there was a file.\n"

CASES: list[tuple[str, int, str]] = [
    # words, exit code, what the line must name
    ("generte", 2, "did you mean generate?"),
    ("--verson", 2, "did you mean --version?"),
    # fetch and prepare
    ("fetch storys", 2, "known: asv, basic, gpt2-bpe, kjv, smollm2, sotu"),
    ("fetch", 2, "NAME"),
    ("prepare storis --out {out}", 2, "did you mean 'stories'?"),
    ("prepare {missing}.txt --out {out}", 2, "no such file"),
    ("prepare {empty} --out {out}", 2, "holds no text"),
    ("prepare {blank} --out {out}", 2, "the corpus is empty"),
    ("prepare {latin1} --out {out}", 2, "is not UTF-8 text"),
    ("prepare {text} --out {out}", 2, "held out do not fill a sequence of 64 each"),
    ("prepare {utf16} --out {out}", 2, "iconv -f utf-16 -t utf-8"),
    ("prepare {half} --out {out}", 2, "line 2 holds half a character (\\ud83d)"),
    ("prepare {text} --tokenizer bep --out {out}", 2, "did you mean 'bpe'?"),
    ("prepare {text} --tokenizer bpe --vocabulary 3 --out {out}", 2, "at least 257"),
    ("prepare stories --vocabulary -3 --out {out}", 2, "vocabulary must be at least 1"),
    ("prepare stories --length 0 --out {out}", 2, "length must be at least 1"),
    ("prepare stories --blocks -1 --out {out}", 2, "blocks must be at least 1"),
    ("prepare stories --lenght 3 --out {out}", 2, "did you mean --length?"),
    ("prepare stories --blocks 4 --heldout-blocks 2 --out {full}", 2, "choose another folder or add --overwrite"),
    ("prepare stories --documents 5 --out {out}", 2, "--documents has no effect on stories"),
    ("prepare sotu --heldout-share 0.1 --out {out}", 2, "--heldout-share has no effect on a named corpus"),
    ("prepare {text} --blocks 3 --out {out}", 2, "--blocks has no effect on files"),
    ("prepare {text} --dataset-split test --out {out}", 2, "it is for a dataset of the hub"),
    ("prepare sotu --out {out}", 2, "convergeflow fetch sotu"),
    # train
    ("train storis", 2, "did you mean 'stories'?"),
    ("train test model.widht=3 --out {out}", 2, "did you mean 'model.width'?"),
    ("train test batch=-3 --out {out}", 2, "batch: must be greater than 0"),
    ("train test batch=many --out {out}", 2, "batch: must be a valid integer"),
    ("train test batch --out {out}", 2, "not key=value"),
    ("train test stages.0.steps=-5 --out {out}", 2, "stages.0.steps: must be greater than 0"),
    ("train {not_yaml} --out {out}", 2, "not valid YAML"),
    ("train test --resume --out {out}", 2, "nothing to resume"),
    ("train test --init-from {missing} --out {out}", 2, "does not exist: give a checkpoint folder"),
    ("train test --init-from {model} --out {out}", 2, "does not fit this configuration"),
    ("train test --init-from {torn} --out {out}", 2, "is damaged"),
    ("train test corpus.paths=[{blank}] --out {out}", 2, "the corpus is empty"),
    ("train test corpus.paths=[{latin1}] --out {out}", 2, "is not UTF-8 text"),
    ("train test corpus.name=storis --out {out}", 2, "did you mean 'stories'?"),
    ("train test --init-from {model} --dry-run", 2, "does not fit this configuration"),
    ("train test --method ar model.method=mdlm --out {out}", 2, "--method and model.method= say the same"),
    ("train test --device cpu device=cuda --out {out}", 2, "--device and device= say the same"),
    ("distill stories-small --device cpu device=cuda --out {out}", 2, "--device and device= say the same"),
    ("train test --device gpu --out {out}", 2, "known: auto, cpu"),
    ("train test --minutes 2e6 --out {out}", 2, "below 1,000,000"),
    ("train --steps 9 --resume --out {out}", 2, "--steps plans a new run"),
    ("train test corpus.length=100000000 --dry-run --out {out}", 2, "lower batch"),
    ("train test --drun", 2, "did you mean --dry-run?"),
    ("train test --out {text}", 2, "is a file, not a folder"),
    # generate, inspect, list
    ("generate --model nothing", 2, "unknown model 'nothing' (known"),
    ("generate --infill ___", 2, "has no word"),
    ("generate --gap 2", 2, "--gap has no effect without --infill"),
    ("generate --ug-schedule C", 2, "--ug-schedule has no effect without --ug: give that too"),
    ("generate --trace {text}", 2, "is a file: give the name of a folder"),
    ("generate --model stories-ar --set temperature=", 2, "temperature of ar must be a number, not ''"),
    ("generate --model stories-ar --set temperature=true", 2, "must be a number, not True"),
    ("generate --model stories-ar --set cache=1", 2, "cache of ar must be true or false, not 1"),
    ("generate --model stories-ar --set nucleus=nan", 2, "nucleus of ar must be a number, not 'nan'"),
    ("generate --model stories-mdlm --set removal=3", 2, "unknown removal '3'"),
    ("generate --model stories-ar --nfe 4", 2, "--nfe has no effect on ar"),
    ("sweep --control nfe --values 4,8 --nfe 16 --out {out}", 2, "nfe varies in this sweep, so --nfe has no effect"),
    ("sweep stories-ar --control nucleus --values 1,0.9 --set nucleus=1 --out {out}", 2, "so --set has no effect"),
    ("generate --prompt caf\udce9", 2, "'caf\\udce9' is not UTF-8"),
    ("generate --model {missing}", 2, "does not exist"),
    ("generate --model {empty}", 2, "has no config.json"),
    ("generate --model {not_json}", 2, "not valid JSON"),
    ("generate --model {text}", 2, "not a checkpoint folder"),
    ("generate --model {no_weights}", 1, "model.safetensors"),
    ("generate --modl {model}", 2, "did you mean --model?"),
    ("generate --model {model} --num 0", 2, "--num must be at least 1"),
    ("generate --model {model} --nfe 0", 2, "--nfe must be at least 1"),
    ("generate --model {model} --nfe -4", 2, "--nfe must be at least 1"),
    ("generate --model {model} --nfe many", 2, "--nfe"),
    ("generate --model {model} --length -4", 2, "--length must be at least 1"),
    ("generate --model {model} --refine -1", 2, "--refine must be 0 or more"),
    ("generate --model {model} --temperature 0", 2, "--temperature must be a positive number"),
    ("generate --model {model} --scg nan", 2, "--scg must be a finite number"),
    ("generate --model {model} --ug inf", 2, "--ug must be a finite number"),
    ("generate --model {model} --schedule D", 2, "known: A, B, C"),
    ("generate --model {model} --nfe 2 --refine 100 --schedule C", 2, "raise --nfe to"),
    ("generate --model {model} --self-condition recursve", 2, "did you mean 'recursive'?"),
    ("generate --model {model} --self-condition none --scg 3", 2, "--scg"),
    ("generate --model {model} --grid midpont", 2, "did you mean 'midpoint'?"),
    ("generate --model {model} --grid {backward}", 2, "must increase strictly"),
    ("generate --model {model} --solver eulr", 2, "did you mean 'euler'?"),
    ("generate --model {model} --decode weigth", 2, "did you mean 'weight'?"),
    ("generate --model {model} --preset headlin", 2, "did you mean 'headline'?"),
    ("generate --model {model} --noise {missing}.npy", 2, "does not exist"),
    ("generate --model {model} --noise {text}", 2, "is not a plain .npy array"),
    ("generate --model {model} --noise {flat}", 2, "three axes"),
    ("generate --model {model} --noise {narrow}", 2, "(2, 8, 64), not (2, 8, 63)"),
    ("generate --model {model} --noise {not_finite}", 2, "not finite"),
    ("generate --model {model} --prompt hello", 2, "need a tokenizer"),
    ("generate --model {model} --precision half", 2, "'float32', 'float64'"),
    ("generate --model {model} --device gpu", 2, "known: auto, cpu"),
    ("generate --model {model} --out {missing}/samples.jsonl", 2, "does not exist"),
    ("generate --model {model} --freeze --freeze-weight 3", 2, "weight"),
    ("generate --model {model} --freeze-weight 0.9", 2, "without --freeze"),
    ("inspect nothing", 2, "unknown model 'nothing'"),
    ("reproduce theorem1 --judge --out {out}", 2, "to judge by"),
    ("inspect {empty}", 2, "has no config.json"),
    ("inspect {text}", 2, "not a JSON record"),
    ("generate --model {other_model}", 2, "bert"),
    ("inspect {other_model}", 2, "bert"),
    ("list modles", 2, "did you mean 'models'?"),
    # import
    ("import langflow {missing} --out {out}", 2, "neither a folder nor a hub repository"),
    ("import langflow {empty} --out {out}", 2, "config.json"),
    ("import langflow {other_model} --out {out}", 2, "'bert', not LangFlow"),
    ("import langflow {not_json} --out {out}", 2, "is not JSON"),
    ("import langflow {langflow} --out {full}", 2, "exists already"),
    ("import langflow {langflow} --ot {out}", 2, "did you mean --out?"),
    ("import langflow {langflow}", 2, "--out"),
    ("import langflow {langflow} --tokenizer {missing} --out {out}", 2, "no tokenizer.json"),
    ("import langflow {wrong_vocabulary} --out {out}", 2, "mis-shaped"),
    ("import convergeflow {missing} --out {out}", 2, "there is no file"),
    ("import convergeflow {text} --out {out}", 2, "it is no torch file"),
    ("import convergeflow {text} --length -3 --out {out}", 2, "--length"),
    ("import convergeflow {text} --weights best --out {out}", 2, "'ema', 'raw'"),
    ("import nothing", 2, "unknown command 'nothing'"),
    ("generate --model {torn}", 2, "model.safetensors"),
    ("generate --model {resized}", 2, "vocabulary"),
    ("generate --model {model} --nfe 2 --length 0", 2, "--length must be at least 1"),
    ("generate --model {model} --nfe 2 --batch 0", 2, "--batch must be at least 1"),
    ("generate --model {model} --nfe 2 --batch -3", 2, "--batch must be at least 1"),
    ("generate --model {model} --nfe 2 --out {text}", 2, "not a sample file"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every wrong thing a user could point at."""
    root = tmp_path_factory.mktemp("bad")
    names = ["empty", "other_model", "not_json", "full", "langflow", "wrong_vocabulary"]
    found = {name: root / name for name in names}
    for name in ("empty", "other_model", "not_json", "full"):
        found[name].mkdir()
    (found["other_model"] / "config.json").write_text('{"model_type": "bert"}')
    (found["not_json"] / "config.json").write_text("{vocabulary: 3")
    for name in ("other_model", "not_json"):
        (found[name] / "model.safetensors").write_bytes(b"")
    (found["full"] / "precious").write_text("mine")
    for name in ("langflow", "wrong_vocabulary"):
        shutil.copytree(GOLDEN / "langflow_tiny", found[name])
    config = found["wrong_vocabulary"] / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 212}))
    found["missing"] = root / "missing"
    found["text"] = root / "text.txt"
    found["text"].write_text(TEXT)
    found["not_yaml"] = root / "not.yaml"
    found["not_yaml"].write_text("{x: [")
    found["blank"] = root / "blank.txt"
    found["blank"].write_text("")
    found["latin1"] = root / "latin1.txt"
    found["latin1"].write_bytes("d\xe9j\xe0 vu\n".encode("latin-1") * 50)
    found["utf16"] = root / "utf16.txt"
    found["utf16"].write_bytes((TEXT * 50).encode("utf-16"))
    found["half"] = root / "half.jsonl"
    found["half"].write_text(json.dumps({"text": "a pair: \U0001f34e"}) + '\n{"text": "half of it: \\ud83d"}\n')
    for name, array in {
        "backward": numpy.array([0.9, 0.1]),
        "flat": numpy.zeros((3, 4)),
        "narrow": numpy.zeros((2, 8, 63)),
        "not_finite": numpy.full((2, 8, 64), numpy.nan),
    }.items():
        found[name] = root / f"{name}.npy"
        numpy.save(found[name], array)
    found["model"] = root / "model"
    assert command_line.main(["import", "langflow", str(found["langflow"]), "--out", str(found["model"])]) == 0
    for name in ("torn", "resized", "no_weights"):
        found[name] = Path(shutil.copytree(found["model"], root / name))
    (found["no_weights"] / "model.safetensors").unlink()
    (found["torn"] / "model.safetensors").write_bytes(b"x" * 1000)
    config = found["resized"] / "config.json"
    config.write_text(config.read_text().replace('"vocabulary": 211', '"vocabulary": 212'))
    found["out"] = root / "out"
    return found


@pytest.mark.parametrize(("line", "code", "hint"), [*(pytest.param(*case, id=case[0]) for case in CASES)])
def test_one_line_and_the_right_exit_code(
    line: str,
    code: int,
    hint: str,
    places: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVERGEFLOW_QUIET", "1")
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path / "cache"))  # nothing was ever fetched here
    capsys.readouterr()
    got = command_line.main([word.format(**places) for word in line.split()])
    captured = capsys.readouterr()
    assert got == code, captured.err
    assert captured.out == ""
    assert captured.err.startswith("error: "), captured.err
    assert captured.err.count("\n") == 1, captured.err
    assert "internal error" not in captured.err
    assert hint.lower() in captured.err.lower(), captured.err
    assert not places["out"].exists(), "a refused command left something behind"
    assert (places["full"] / "precious").read_text() == "mine"
    assert places["text"].read_text() == TEXT
