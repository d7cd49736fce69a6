"""Models by name: shipped ones, folders, runs, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from convergeflow import zoo
from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel
from convergeflow.systems.protocol import write_tensors
from convergeflow.training import checkpoint


def saved(folder: Path) -> ConvergeFlowModel:
    torch.manual_seed(0)
    model = ConvergeFlowModel(ConvergeFlowConfig.of_size("test", vocabulary=7, length=4))
    model.save_pretrained(folder)
    return model


def test_a_folder_a_run_and_its_averaged_weights(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def write(folder: Path) -> None:
        model = saved(folder)
        average = {name: value + 1 for name, value in model.state_dict().items()}
        write_tensors(folder / "ema.safetensors", average)

    checkpoint.save_step(run, 3, write, keep=2)
    averaged, raw = zoo.load_model(run), zoo.load_model(run, average=False)
    torch.testing.assert_close(averaged.network.head.bias, raw.network.head.bias + 1)
    assert not averaged.training


def test_a_changed_byte_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint.write_folder(tmp_path / "model", lambda folder: saved(folder) and None)
    weights = tmp_path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(ConvergeFlowError, match=r"model\.safetensors"):
        zoo.load_model(tmp_path / "model")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown model"):
        zoo.load_model("storis-small")
    with pytest.raises(UserError, match="does not exist"):
        zoo.load_model("./nowhere")
    with pytest.raises(UserError, match=r"no config\.json"):
        zoo.load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        zoo.load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="bert"):
        zoo.load_model(tmp_path)


def test_every_shipped_model_loads_and_has_a_card() -> None:
    for name in zoo.shipped_models():
        model = zoo.load_model(name)
        assert model.tokenizer is not None
        assert (zoo.locate(name) / "card.md").is_file()


def test_loading_a_model_imports_nothing_that_it_does_not_need() -> None:
    code = (
        "import sys; from convergeflow import zoo; zoo.shipped_models(); assert 'torch' not in sys.modules;"
        "zoo.load_model(device='cpu');"
        "heavy = {'transformers', 'accelerate', 'scipy', 'matplotlib'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_raw_weights_of_a_finished_run_are_those_of_its_newest_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def write(folder: Path) -> None:
        write_tensors(folder / "ema.safetensors", saved(folder).state_dict())

    checkpoint.save_step(run, 3, write, keep=2)
    saved(run / "model")
    assert zoo.locate(run) == run / "model"
    assert zoo.locate(run, average=False).name == "step-00000003"
    with pytest.raises(UserError, match="one set of weights"):
        zoo.load_model(run / "model", average=False)
