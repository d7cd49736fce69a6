"""Lightning files with pickled settings, as the repositories write them: the settings decide what a file is.

The classes are stand-ins with the names and the pickled form of omegaconf's and Lightning's; the weights are golden.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from convergeflow import zoo
from convergeflow.cli.main import main

PEERS = Path(__file__).resolve().parent.parent / "golden" / "peers"
SMALL = {
    "name": "small",
    "hidden_size": 32,
    "cond_dim": 16,
    "length": 16,
    "n_blocks": 2,
    "n_heads": 2,
    "dropout": 0.1,
    "scale_by_sigma": True,
    "tie_word_embeddings": False,
}


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes settings in the form that omegaconf and Lightning pickle them."""
    homes = {
        "omegaconf.dictconfig": type("DictConfig", (), {}),
        "omegaconf.nodes": type("AnyNode", (), {}),
        "lightning.fabric.utilities.data": type("AttributeDict", (dict,), {}),
        "lightning.pytorch.callbacks.model_checkpoint": type("ModelCheckpoint", (), {}),
    }
    for home, kind in homes.items():
        kind.__module__ = home
        module = types.ModuleType(home)
        setattr(module, kind.__name__, kind)
        for depth in range(1, home.count(".") + 1):
            parent = ".".join(home.split(".")[:depth])
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or types.ModuleType(parent))
        monkeypatch.setitem(sys.modules, home, module)
    config_class, node_class, holder, callback = homes.values()

    def config(value: Any) -> Any:
        made = config_class() if isinstance(value, dict) else node_class()
        if isinstance(value, dict):
            made.__dict__ = {"_content": {key: config(item) for key, item in value.items()}, "_parent": None}
        else:
            made.__dict__ = {"_val": value, "_parent": None}
        return made

    def settings(value: dict[str, Any]) -> Any:
        return holder(
            {"config": config(value), "path": PurePosixPath("out"), "seed": np.float64(1.0), "at": callback()}
        )

    return settings


def written(path: Path, source: str, hyper_parameters: Any) -> str:
    checkpoint = torch.load(PEERS / source, weights_only=True)
    checkpoint |= {"hyper_parameters": hyper_parameters, "hparams_name": "kwargs"}
    torch.save(checkpoint, path)
    return str(path)


def run(algorithm: str, **algo: Any) -> dict[str, Any]:
    """Settings of the Duo and FLM repositories."""
    return {"algo": {"name": algorithm, **algo}, "model": SMALL, "noise": {"type": "log-linear"}}


@pytest.mark.parametrize(
    ("peer", "source", "config", "method"),
    [
        ("duo", "duo/duo_plain.ckpt", run("duo", causal_attention=False), "published-duo"),
        ("duo", "duo/duo_plain.ckpt", run("distillation", causal_attention=False), "published-duo"),
        ("mdlm", "mdlm/mdlm_plain.ckpt", run("mdlm", time_conditioning=False), "published-mdlm"),
        ("sedd", "mdlm/sedd_plain.ckpt", run("sedd", time_conditioning=True), "published-sedd-absorb"),
        ("ar", "mdlm/ar_plain.ckpt", run("ar", causal_attention=True), "published-ar"),
        ("flm", "flm/flm_plain.ckpt", run("flm"), "published-flm"),
        ("fmlm", "fmlm/fmlm_double_plain.ckpt", run("flm_distill_double"), "published-fmlm"),
        ("ar", "mdlm/ar_plain.ckpt", {"parameterization": "ar", "backbone": "ar", "model": SMALL}, "published-ar"),
    ],
)
def test_settings_in_a_file_are_understood(
    tmp_path: Path, foreign: Any, peer: str, source: str, config: dict[str, Any], method: str, capsys: Any
) -> None:
    file = written(tmp_path / "file.ckpt", source, foreign(config))
    assert main(["import", peer, file, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "your word is taken" not in said and "DictConfig" in said and "AttributeDict" in said
    model = zoo.load_model(tmp_path / "out", device="cpu")
    assert (model.method, model.config.length) == (method, 16)


@pytest.mark.parametrize(
    ("peer", "source", "config", "words"),
    [
        ("mdlm", "duo/duo_plain.ckpt", run("duo"), "says that it is duo"),
        ("duo", "duo/duo_plain.ckpt", run("d3pm"), "says that it is d3pm"),
        ("mdlm", "mdlm/mdlm_plain.ckpt", {"parameterization": "d3pm", "model": SMALL}, "says that it is d3pm"),
        ("mdlm", "mdlm/mdlm_plain.ckpt", run("mdlm", causal_attention=True), "causal attention"),
        ("duo", "duo/duo_plain.ckpt", {**run("duo"), "noise": {"type": "cosine"}}, "'cosine' noise"),
        ("duo", "duo/duo_plain.ckpt", {**run("duo"), "model": {**SMALL, "tie_word_embeddings": True}}, "ties"),
        ("duo", "duo/duo_plain.ckpt", {**run("duo"), "model": {**SMALL, "n_blocks": 3}}, "missing: backbone.blocks.2"),
        ("fmlm", "fmlm/fmlm_distill_plain.ckpt", run("flm_semigroup_distill"), "first stage: give its FLM"),
    ],
)
def test_settings_that_disagree_are_refused(
    tmp_path: Path, foreign: Any, peer: str, source: str, config: dict[str, Any], words: str, capsys: Any
) -> None:
    file = written(tmp_path / "file.ckpt", source, foreign(config))
    assert main(["import", peer, file, "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err


def test_settings_that_refer_to_others_leave_the_sizes_to_the_tensors(tmp_path: Path, foreign: Any) -> None:
    config = run("duo") | {"model": {**SMALL, "hidden_size": "${width}", "length": "${data.length}"}}
    file = written(tmp_path / "file.ckpt", "duo/duo_plain.ckpt", foreign(config))
    assert main(["import", "duo", file, "--out", str(tmp_path / "out")]) == 0
    config = zoo.load_model(tmp_path / "out", device="cpu").config
    assert (config.width, config.length) == (32, 1024)
