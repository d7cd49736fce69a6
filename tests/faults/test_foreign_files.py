"""Checkpoints and tables of strangers that are made to break a reader: one line each, at once, in little memory."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_run import Outcome

from convergeflow.interop import plain_pickle
from convergeflow.interop.plain_pickle import Refused
from convergeflow.interop.torch_file import read_torch_file

PEERS = Path(__file__).resolve().parent.parent / "golden" / "peers"
Command = Callable[..., Outcome]


def refused(command: Command, out: Path, *words: object) -> str:
    ended = command("import", *words, "--out", out)
    assert ended.code == 2 and ended.line.startswith("error: "), ended
    assert not out.exists()
    return ended.line


def read(program: bytes) -> Any:
    return plain_pickle.read(program, {}, lambda reference: None)


# --- pickles: a few bytes that describe more than any machine holds ---

NESTED = b"(" + b"K\x01" + b"t" + b"2\x86" * 60
"""A tuple of itself twice, sixty times over: its hash would take years."""


@pytest.mark.parametrize(
    "program",
    [
        b"}" + NESTED + b"K\x01s.",
        b"\x8f(" + NESTED + b"\x90.",
        b"(" + NESTED + b"\x91.",
        b"(" + NESTED + b"K\x01d.",
        b"c__builtin__\nset\n(](" + NESTED + b"etR.",
        b"ccollections\nOrderedDict\n(](](" + NESTED + b"K\x01eetR.",
    ],
    ids=["item", "set", "frozenset", "dict", "set()", "OrderedDict()"],
)
def test_a_key_that_is_tuples_in_tuples_is_refused_at_once(program: bytes) -> None:
    with pytest.raises(Refused, match="as a key"):
        read(program)


def test_containers_are_not_copied_without_end() -> None:
    elements = b"](" + b"K\x01" * 1000 + b"eq\x00"
    copies = b"c__builtin__\nlist\nq\x01" + b"h\x01h\x00\x85R" * 20_000
    with pytest.raises(Refused, match="without end"):
        read(b"(" + elements + copies + b"l.")


def test_plain_keys_and_containers_are_read_as_before() -> None:
    value = {("a", 1): {1, 2}, 3: frozenset({"x"}), None: [1], b"b": (2.5, True)}
    assert read(pickle.dumps(value))[0] == value


def test_settings_that_hold_each_other_are_refused(tmp_path: Path, command: Command) -> None:
    checkpoint = torch.load(PEERS / "mdlm/mdlm_plain.ckpt", weights_only=True)
    inner: Any = {"a": 1}
    for _ in range(25):
        inner = {"a": inner, "b": inner}
    torch.save({**checkpoint, "hyper_parameters": {"config": {"model": inner}}}, tmp_path / "x.ckpt")
    assert "no end" in refused(command, tmp_path / "out", "mdlm", tmp_path / "x.ckpt")


def test_a_tensor_that_repeats_its_numbers_is_refused(tmp_path: Path, command: Command) -> None:
    checkpoint = torch.load(PEERS / "mdlm/mdlm_plain.ckpt", weights_only=True)
    few = torch.zeros(1).expand(1 << 40)
    checkpoint["state_dict"]["backbone.output_layer.linear.bias"] = few
    torch.save(checkpoint, tmp_path / "x.ckpt")
    assert "repeats few numbers" in refused(command, tmp_path / "out", "mdlm", tmp_path / "x.ckpt")


# --- archives ---


def repacked(source: Path, target: Path, change: Callable[[str, bytes], bytes]) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))
    return target


def test_a_wrong_checksum_is_refused(tmp_path: Path, command: Command) -> None:
    content = bytearray((PEERS / "mdlm/mdlm_plain.ckpt").read_bytes())
    content[content.index(b"state_dict")] ^= 1
    (tmp_path / "x.ckpt").write_bytes(content)
    assert "damaged" in refused(command, tmp_path / "out", "mdlm", tmp_path / "x.ckpt")
    with pytest.raises(Refused, match="damaged"):
        read_torch_file(tmp_path / "x.ckpt")


@pytest.mark.parametrize("place", [4, 6, 8, 10, 20, 24, 42])
def test_a_directory_that_lies_is_refused_or_read(tmp_path: Path, place: int, command: Command) -> None:
    """Versions, flags, methods and sizes in the list of an archive's parts."""
    content = bytearray((PEERS / "duo/duo_plain.ckpt").read_bytes())
    at = content.index(b"PK\x01\x02") + place
    content[at : at + 2] = b"\xff\xff"
    (tmp_path / "x.ckpt").write_bytes(content)
    assert command("import", "duo", tmp_path / "x.ckpt", "--out", tmp_path / "out").code in (0, 2)


def test_published_files_are_read_by_the_same_reader(tmp_path: Path, command: Command) -> None:
    state = load_file(PEERS.parent / "langflow_tiny/model.safetensors")
    torch.save({"model": state, "ema": {**state, "x": torch.zeros(1).expand(1 << 40)}}, tmp_path / "x.pt")
    assert "repeats few numbers" in refused(command, tmp_path / "out", "convergeflow", tmp_path / "x.pt")


# --- names and settings ---


def hub(tmp_path: Path, **changes: Any) -> Path:
    folder = Path(shutil.copytree(PEERS / "mdlm/hf", tmp_path / "hf", dirs_exist_ok=True))
    config = json.loads((PEERS / "mdlm/hf/config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    "changes",
    [{"vocab_size": 16_000_000}, {"n_blocks": 60_000, "hidden_dim": 32}, {"hidden_dim": 60_000}, {"cond_dim": 1e999}],
    ids=str,
)
def test_sizes_far_beyond_the_weights_are_refused_before_they_are_built(
    tmp_path: Path, changes: dict[str, Any], command: Command
) -> None:
    refused(command, tmp_path / "out", "mdlm", hub(tmp_path, **changes))


def test_nested_settings_are_refused(tmp_path: Path, command: Command) -> None:
    folder = hub(tmp_path)
    (folder / "config.json").write_text("[" * 100_000)
    assert "nested too deeply" in refused(command, tmp_path / "out", "mdlm", folder)


@pytest.mark.parametrize("settings", ["a: &a [x]\nb: *a\n", "[" * 3000, "when: 2001-99-99\n", "graph: 1\nmodel: 2\n"])
def test_a_runs_settings_are_read_with_care(tmp_path: Path, settings: str, command: Command) -> None:
    run = Path(shutil.copytree(PEERS / "sedd/absorb/local", tmp_path / "run"))
    (run / ".hydra/config.yaml").write_text(settings)
    assert "config.yaml" in refused(command, tmp_path / "out", "sedd", run) or settings.startswith("graph")


@pytest.mark.parametrize("noise", [None, "x", [1]])
def test_settings_of_another_kind_are_refused(tmp_path: Path, noise: Any, command: Command) -> None:
    checkpoint = torch.load(PEERS / "mdlm/mdlm_plain.ckpt", weights_only=True)
    settings = {"parameterization": "subs", "noise": noise, "model": {"hidden_size": 32}}
    torch.save({**checkpoint, "hyper_parameters": {"config": settings}}, tmp_path / "x.ckpt")
    assert "settings" in refused(command, tmp_path / "out", "mdlm", tmp_path / "x.ckpt")


@pytest.mark.parametrize(("peer", "place"), [("mdlm", "mdlm/hf"), ("elf", "elf/ckpt/checkpoint_3")])
def test_a_name_with_a_giant_number_builds_no_giant(tmp_path: Path, peer: str, place: str, command: Command) -> None:
    if peer == "mdlm":
        source = hub(tmp_path)
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "n_blocks": 0}))
        weights = load_file(source / "model.safetensors")
        save_file({**weights, "backbone.blocks.999999999999.x": torch.zeros(1)}, source / "model.safetensors")
    else:
        checkpoint = torch.load(PEERS / place, weights_only=True)
        checkpoint["params"]["blocks.999999999999.x"] = torch.zeros(1)
        source = tmp_path / "checkpoint_3"
        torch.save(checkpoint, source)
    refused(command, tmp_path / "out", peer, source)


# --- Orbax ---


@pytest.fixture
def orbax(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PEERS / "elf-jax/ckpt/checkpoint_3", tmp_path / "checkpoint_3"))


@pytest.mark.parametrize(
    "metadata",
    ["[" * 100_000, "[]", '{"tree_metadata": []}', '{"tree_metadata": {"a": {"key_metadata": [{"key": [1]}]}}}', "{"],
    ids=["nested", "list", "tree", "key", "torn"],
)
def test_a_list_of_arrays_of_another_kind_is_refused(orbax: Path, metadata: str, command: Command) -> None:
    (orbax / "_METADATA").write_text(metadata)
    refused(command, orbax.parent / "out", "elf", orbax)


def test_arrays_are_not_read_from_other_folders(orbax: Path, command: Command) -> None:
    parts = [{"key": "params"}, {"key": "/../../elsewhere"}]
    (orbax / "_METADATA").write_text(json.dumps({"tree_metadata": {"a": {"key_metadata": parts}}}))
    assert "a path for a name" in refused(command, orbax.parent / "out", "elf", orbax)


def test_an_array_that_claims_terabytes_is_refused(orbax: Path, command: Command) -> None:
    """Without a single stored number, zarr fills an array with its fill value."""
    (orbax / "manifest.ocdbt").unlink()
    (orbax / "params.x").mkdir()
    about = {"shape": [1 << 20, 1 << 20], "chunks": [1, 1], "dtype": "<f4", "fill_value": 0, "order": "C"}
    about |= {"zarr_format": 2, "compressor": None, "filters": None}
    (orbax / "params.x/.zarray").write_text(json.dumps(about))
    (orbax / "_METADATA").write_text(
        json.dumps({"tree_metadata": {"a": {"key_metadata": [{"key": "params"}, {"key": "x"}]}}})
    )
    assert "far more than the files hold" in refused(command, orbax.parent / "out", "elf", orbax)


# --- tables ---


def table(column: Any) -> bytes:
    target = io.BytesIO()
    pq.write_table(pa.table({"text": column}), target, row_group_size=16, compression="snappy", use_dictionary=False)
    return target.getvalue()


TEXTS = [f"Once there was a text with the number {number}." for number in range(60)]


def prepared(command: Command, file: Path) -> Outcome:
    words = ("--tokenizer", "byte", "--length", 8, "--out", file.parent / "corpus")
    return command("prepare", file, *words)


def test_a_table_that_is_damaged_behind_its_beginning_is_refused(tmp_path: Path, command: Command) -> None:
    content = bytearray(table(pa.array(TEXTS)))
    content[len(content) // 3 : len(content) // 3 + 200] = b"\xff" * 200
    (tmp_path / "x.parquet").write_bytes(content)
    ended = prepared(command, tmp_path / "x.parquet")
    assert ended.code == 2 and "x.parquet is damaged" in ended.line


def test_a_table_of_bytes_that_are_no_text_is_refused(tmp_path: Path, command: Command) -> None:
    column = pa.array([b"\xff\xfe" + text.encode() for text in TEXTS]).view(pa.string())
    (tmp_path / "x.parquet").write_bytes(table(column))
    ended = prepared(command, tmp_path / "x.parquet")
    assert ended.code == 2 and "not UTF-8" in ended.line


def test_a_footer_of_any_length_is_refused(tmp_path: Path, command: Command) -> None:
    content = table(pa.array(TEXTS))
    for length in (0, 1, 2**31 - 1, 2**32 - 1):
        (tmp_path / "x.parquet").write_bytes(content[:-8] + struct.pack("<I", length) + content[-4:])
        assert prepared(command, tmp_path / "x.parquet").code == 2
