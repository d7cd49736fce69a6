"""What an importer must refuse: pickles that would run, files that say they are something else, wrong tensors."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from convergeflow.cli.main import main
from convergeflow.interop import plain_pickle
from convergeflow.interop.torch_file import read_torch_file

PEERS = Path(__file__).resolve().parent.parent / "golden" / "peers"


class Runs:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def refused(capsys: pytest.CaptureFixture[str], out: Path, *words: str) -> str:
    """The one line of a refusal; the import must leave nothing behind."""
    capsys.readouterr()
    assert main(["import", *words, "--out", str(out)]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ") and "\n" not in said
    assert not out.exists()
    return said


def malicious(mark: Path) -> dict[str, Any]:
    return {
        "posix.system": Runs(os.system, f"touch {mark}"),
        "builtins.eval": Runs(eval, f"open({str(mark)!r}, 'w')"),
        "builtins.exec": Runs(exec, f"open({str(mark)!r}, 'w')"),
        "subprocess.Popen": Runs(subprocess.Popen, ["touch", str(mark)]),
        "builtins.getattr": Runs(getattr, "x", "upper"),
        "torch.hub.load": Runs(torch.hub.load, "owner/name", "model"),
    }


@pytest.mark.parametrize("name", sorted(malicious(Path("mark"))))
@pytest.mark.parametrize("place", ["hyper_parameters", "state_dict", "optimizer_states"])
def test_a_malicious_pickle_is_refused_without_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, place: str
) -> None:
    mark = tmp_path / "it-ran"
    checkpoint = torch.load(PEERS / "mdlm" / "mdlm_plain.ckpt", weights_only=True)
    checkpoint[place] = {"config": malicious(mark)[name]}
    torch.save(checkpoint, tmp_path / "bad.ckpt")
    assert name in refused(capsys, tmp_path / "out", "mdlm", str(tmp_path / "bad.ckpt"))
    assert not mark.exists()


def test_the_layout_before_zip_runs_nothing_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "it-ran"
    bad = {"state_dict": {}, "x": Runs(os.system, f"touch {mark}")}
    torch.save(bad, tmp_path / "bad.ckpt", _use_new_zipfile_serialization=False)
    assert "posix.system" in refused(capsys, tmp_path / "out", "duo", str(tmp_path / "bad.ckpt"))
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(bad))
    refused(capsys, tmp_path / "out", "duo", str(tmp_path / "plain.pkl"))
    assert not mark.exists()


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_comes_back_whole(protocol: int) -> None:
    value = {"a": [1, -(2**70), 2.5, None, True, b"\x00\xff", "text", (1, (2,), ())], "b": {1, 2}, 3: frozenset({4})}
    value["self"] = value["a"]
    found, aside = plain_pickle.read(pickle.dumps(value, protocol), {}, lambda reference: None)
    assert found == value and found["self"] is found["a"] and not aside


def test_foreign_objects_are_set_aside_by_name() -> None:
    from fractions import Fraction
    from pathlib import PurePosixPath

    with pytest.raises(plain_pickle.Refused, match="Fraction"):
        plain_pickle.read(pickle.dumps(Fraction(1, 2)), {}, lambda reference: None)
    found, aside = plain_pickle.read(pickle.dumps([PurePosixPath("a"), 1]), {}, lambda reference: None)
    assert isinstance(found[0], plain_pickle.SetAside) and found[1] == 1 and len(aside) == 1


@given(st.integers(0, 10_000), st.integers(0, 255), st.integers(0, 5))
def test_a_changed_byte_is_read_or_refused_and_nothing_else(place: int, byte: int, protocol: int) -> None:
    data = bytearray(pickle.dumps({"a": [1, 2.5, ("b", None)], "c": {"d": b"e"}, "f": {1, 2}}, protocol))
    data[place % len(data)] = byte
    before = set(sys.modules)
    with contextlib.suppress(plain_pickle.Refused):
        plain_pickle.read(bytes(data), {}, lambda reference: None)
    assert set(sys.modules) == before


@pytest.mark.parametrize("cut", [10, 2000, 300_000])
def test_a_part_of_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], cut: int) -> None:
    whole = (PEERS / "duo" / "duo_plain.ckpt").read_bytes()
    (tmp_path / "part.ckpt").write_bytes(whole[:cut])
    refused(capsys, tmp_path / "out", "duo", str(tmp_path / "part.ckpt"))


def test_tensors_cannot_reach_outside_their_numbers(tmp_path: Path) -> None:
    """A pickle that asks for more numbers than a storage has is refused, not read from beyond it."""
    torch.save({"x": torch.zeros(4)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as source, zipfile.ZipFile(tmp_path / "y.pt", "w") as target:
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename.endswith("data.pkl"):
                at = data.index(b"K\x00K\x04\x85")  # offset 0, size (4,)
                data = data[:at] + b"K\x00K\x40\x85" + data[at + 5 :]
            target.writestr(entry.filename, data)
    assert torch.equal(read_torch_file(tmp_path / "x.pt").value["x"], torch.zeros(4))
    with pytest.raises(plain_pickle.Refused, match="larger than its numbers"):
        read_torch_file(tmp_path / "y.pt")


Change = Callable[[dict[str, Any]], None]


def lightning(tmp_path: Path, source: str, change: Change) -> str:
    checkpoint = torch.load(PEERS / source, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, tmp_path / "changed.ckpt")
    return str(tmp_path / "changed.ckpt")


@pytest.mark.parametrize("weights", ["raw", "ema"])
@pytest.mark.parametrize(
    "name",
    [
        "vocab_embed.embedding",
        "sigma_map.mlp.0.weight",
        "rotary_emb.inv_freq",
        "blocks.0.norm1.weight",
        "blocks.1.attn_qkv.weight",
        "output_layer.linear.bias",
        "output_layer.adaLN_modulation.weight",
    ],
)
def test_every_wrong_tensor_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, weights: str
) -> None:
    name = f"backbone.{name}"

    def missing(checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"][name]

    def misshapen(checkpoint: dict[str, Any]) -> None:
        tensor = checkpoint["state_dict"][name]
        checkpoint["state_dict"][name] = torch.cat([tensor, tensor[:1]])

    def unexpected(checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"][f"{name}.more"] = torch.zeros(1)

    for change in (missing, misshapen, unexpected):
        source = lightning(tmp_path, "duo/duo_plain.ckpt", change)
        said = refused(capsys, tmp_path / "out", "duo", source, "--weights", weights)
        assert name in said and change.__name__.replace("misshapen", "mis-shaped") in said


def test_an_average_that_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shorter(checkpoint: dict[str, Any]) -> None:
        checkpoint["ema"]["shadow_params"].pop()

    def shifted(checkpoint: dict[str, Any]) -> None:
        listed = checkpoint["ema"]["shadow_params"]
        listed[:] = [*listed[1:], listed[0]]

    for change, words in ((shorter, "29 tensors for 30"), (shifted, "backbone.vocab_embed.embedding")):
        source = lightning(tmp_path, "duo/duo_plain.ckpt", change)
        assert words in refused(capsys, tmp_path / "out", "duo", source)


def test_numbers_that_are_none_and_other_rotations_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def infinite(checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["backbone.blocks.1.mlp.0.bias"][3] = torch.nan

    def other_base(checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["backbone.rotary_emb.inv_freq"] **= 2

    for change, name in ((infinite, "blocks.1.mlp.0.bias"), (other_base, "rotary_emb.inv_freq")):
        source = lightning(tmp_path, "flm/flm_plain.ckpt", change)
        assert name in refused(capsys, tmp_path / "out", "flm", source)


@pytest.mark.parametrize(
    ("peer", "source", "words"),
    [
        ("duo", "mdlm/hf", "says that it is mdlm"),
        ("mdlm", "duo/hf", "says that it is duo"),
        ("mdlm", "sedd/absorb/hf", "says that it is sedd"),
        ("duo", "mdlm/mdlm_full.ckpt", "says that it is mdlm"),
        ("duo", "flm/flm_full.ckpt", "says that it is flm"),
        ("fmlm", "flm/flm_full.ckpt", "says that it is flm"),
        ("mdlm", "mdlm/ar_plain.ckpt", "missing: backbone.blocks.0.adaLN_modulation.bias"),
        ("ar", "mdlm/mdlm_plain.ckpt", "unexpected: backbone.blocks.0.adaLN_modulation.bias"),
        ("flm", "fmlm/fmlm_double_plain.ckpt", "unexpected: backbone.learnable_loss_weighting"),
        ("fmlm", "flm/flm_plain.ckpt", "missing: backbone.learnable_loss_weighting"),
        ("elf", "duo/hf", "not a checkpoint of ELF"),
        ("plaid", "duo/hf", "four .pt files"),
        ("mdlm", "plaid/weights", "not a checkpoint of mdlm"),
        ("mdlm", "elf/ckpt", "not a checkpoint of mdlm"),
        ("mdlm", "no-such-file.ckpt", "neither"),
        ("mdlm", "mdlm", "several checkpoints (ar_plain.ckpt"),
        ("mdlm", "..", "no checkpoint in a layout that is known"),
    ],
)
def test_the_file_decides_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], peer: str, source: str, words: str
) -> None:
    assert words in refused(capsys, tmp_path / "out", peer, str(PEERS / source))


def test_a_hub_folder_has_one_set_of_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, tmp_path / "out", "duo", str(PEERS / "duo" / "hf"), "--weights", "raw")
    assert "holds only the ema weights" in said


def test_sizes_in_the_settings_are_held_against_the_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(PEERS / "mdlm" / "hf", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    for key, value, name in (("n_blocks", 3, "blocks.2."), ("cond_dim", 129, "sigma_map"), ("n_heads", 4, "inv_freq")):
        (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, key: value}))
        assert name in refused(capsys, tmp_path / "out", "mdlm", str(tmp_path / "hf"))
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    del weights["backbone.blocks.1.norm2.weight"]
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    assert "missing: backbone.blocks.1.norm2.weight" in refused(capsys, tmp_path / "out", "mdlm", str(tmp_path / "hf"))


def test_a_run_without_settings_does_not_say_its_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(PEERS / "sedd" / "absorb" / "local", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / ".hydra")
    assert ".hydra/config.yaml" in refused(capsys, tmp_path / "out", "sedd", str(tmp_path / "run"))


def test_elf_and_plaid_name_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = torch.load(PEERS / "elf" / "ckpt" / "checkpoint_3", weights_only=True)
    checkpoint["ema_params1"]["blocks.1.attn.q_norm.weight"] = torch.ones(15)
    torch.save(checkpoint, tmp_path / "checkpoint_4")
    assert "blocks.1.attn.q_norm.weight is (15,)" in refused(capsys, tmp_path / "o", "elf", str(tmp_path))
    del checkpoint["params"]["unembed_kernel"]
    torch.save(checkpoint, tmp_path / "checkpoint_4")
    assert "missing: unembed_kernel" in refused(capsys, tmp_path / "o", "elf", str(tmp_path / "checkpoint_4"))
    shutil.copytree(PEERS / "plaid" / "weights", tmp_path / "plaid")
    bounds = torch.load(tmp_path / "plaid" / "gamma_bounds.pt", weights_only=True)
    torch.save({"gamma_0": bounds["gamma_0"]}, tmp_path / "plaid" / "gamma_bounds.pt")
    assert "missing: gamma_bounds.gamma_1" in refused(capsys, tmp_path / "o", "plaid", str(tmp_path / "plaid"))
    (tmp_path / "plaid" / "gamma_bounds.pt").unlink()
    assert "not gamma_bounds.pt" in refused(capsys, tmp_path / "o", "plaid", str(tmp_path / "plaid"))


def test_compiled_names_and_a_run_folder_are_understood(tmp_path: Path) -> None:
    checkpoint = torch.load(PEERS / "flm" / "flm_plain.ckpt", weights_only=True)
    names = {name: name.replace("backbone.blocks", "backbone._orig_mod.blocks") for name in checkpoint["state_dict"]}
    checkpoint["state_dict"] = {names[name]: tensor for name, tensor in checkpoint["state_dict"].items()}
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    torch.save(checkpoint, tmp_path / "run" / "checkpoints" / "last.ckpt")
    torch.save(checkpoint, tmp_path / "run" / "checkpoints" / "best.ckpt")
    assert main(["import", "flm", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
