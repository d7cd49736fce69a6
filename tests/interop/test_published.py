"""Published `.pt` checkpoints: the right weights are taken, and nothing but tensors is ever read."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from convergeflow.errors import UserError
from convergeflow.interop.langflow import load_langflow
from convergeflow.interop.published import load_published

TINY = Path(__file__).resolve().parent.parent / "golden" / "langflow_tiny"


def checkpoint(**changes: Any) -> dict[str, Any]:
    """A file as the published training code writes it: raw weights, average, optimizer state, options."""
    ema = load_file(TINY / "model.safetensors")
    raw = {name: tensor.clone() for name, tensor in ema.items()}
    raw["backbone.output_layer.linear.bias"] += 1.0
    raw["proposal.loc"] += 0.5
    optimizer = {"state": {0: {"step": torch.tensor(5.0)}}, "param_groups": [{"lr": 1e-5, "params": [0]}]}
    options = argparse.Namespace(block_size=24, lr=1e-5, model="somewhere")
    return {"model": raw, "ema": ema, "opt": optimizer, "args": options, **changes}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "0175000.pt"


def test_ema_and_raw_by_choice(file: Path) -> None:
    torch.save(checkpoint(), file)
    reference = load_langflow(TINY)
    ema, raw = load_published(file), load_published(file, weights="raw")
    for name, tensor in reference.state_dict().items():
        assert torch.equal(ema.state_dict()[name], tensor), name
    torch.testing.assert_close(raw.network.head.bias, reference.network.head.bias + 1.0)
    assert ema.config.schedule["loc"] == pytest.approx(4.9563, abs=1e-6)
    assert raw.config.schedule["loc"] == pytest.approx(5.4563, abs=1e-6)
    assert (ema.config.heads, ema.config.depth, ema.config.length) == (4, 2, 24)
    assert load_published(file, length=16).config.length == 16


class Trap:
    """Pickled, this runs a command when it is read without care."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.proof}",)


def test_code_in_a_file_never_runs(file: Path, tmp_path: Path) -> None:
    proof = tmp_path / "it-ran"
    torch.save(checkpoint(args=Trap(proof)), file)
    with pytest.raises(UserError, match="system") as refusal:
        load_published(file)
    assert not proof.exists()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"state_dict": {}}, 'neither "model" nor "ema"'),
        ([1, 2], 'neither "model" nor "ema"'),
        ({"model": {}, "ema": {}}, "does not hold a LangFlow network"),
        ({"model": {"a": 1}, "ema": 3}, 'no weights under "ema"; try `weights` raw'),
        (checkpoint(ema={"backbone.vocab_embed.embedding": torch.zeros(3)}), "does not hold a LangFlow network"),
    ],
    ids=["other keys", "a list", "empty", "no weights", "one vector"],
)
def test_other_archives_are_refused_in_one_line(file: Path, content: Any, complaint: str) -> None:
    torch.save(content, file)
    with pytest.raises(UserError) as refusal:
        load_published(file)
    assert complaint in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_missing_and_foreign_tensors_are_named(file: Path) -> None:
    content = checkpoint()
    content["ema"] = {f"module.{name}" if name == "proposal.loc" else name: t for name, t in content["ema"].items()}
    torch.save(content, file)
    with pytest.raises(UserError, match=r"missing: proposal\.loc; unexpected: module\.proposal\.loc"):
        load_published(file)


def test_what_is_no_archive_is_refused(file: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        load_published(file)
    file.write_text("hello")
    with pytest.raises(UserError, match="no torch file"):
        load_published(file)
    torch.save(checkpoint(), file)
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UserError, match="no torch file"):
        load_published(file)
    with pytest.raises(UserError, match="`weights`"):
        load_published(file, weights="average")
