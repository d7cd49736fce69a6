"""Files that strangers send, and ways to damage them: bytes, values, headers, archives and names."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "golden"
PEERS = GOLDEN / "peers"
SHIPPED = HERE.parents[1] / "src/convergeflow/checkpoints/stories-small"
LINE = {"seed": 1, "ids": [1, 2, 3], "text": "a b c", "nfe": 4, "model": "m", "settings": {"nfe": 4}}
RECORD: dict[str, Any] = {"gen_ppl": 2.0, "gen_ppl_se": 0.1, "entropy": 1.0, "entropy_se": 0.1, "n": 2, "metrics": {}}

CHECKPOINTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "mdlm hub": ("mdlm", "mdlm/hf", ("config.json", "model.safetensors")),
    "mdlm file": ("mdlm", "mdlm/mdlm_plain.ckpt", ("",)),
    "mdlm run": ("mdlm", "mdlm/mdlm_full.ckpt", ("",)),
    "duo hub": ("duo", "duo/hf", ("config.json", "model.safetensors")),
    "duo file": ("duo", "duo/duo_plain.ckpt", ("",)),
    "sedd hub": ("sedd", "sedd/absorb/hf", ("config.json", "model.safetensors")),
    "sedd uniform": ("sedd", "sedd/uniform/hf", ("config.json", "model.safetensors")),
    "sedd run": ("sedd", "sedd/absorb/local", (".hydra/config.yaml", "checkpoints-meta/checkpoint.pth")),
    "ar file": ("ar", "mdlm/ar_plain.ckpt", ("",)),
    "flm file": ("flm", "flm/flm_full.ckpt", ("",)),
    "fmlm file": ("fmlm", "fmlm/fmlm_double_plain.ckpt", ("",)),
    "elf file": ("elf", "elf/ckpt/checkpoint_3", ("",)),
    "elf folder": ("elf", "elf-jax/ckpt/checkpoint_3", ("_METADATA", "manifest.ocdbt", "d/*", "ocdbt.process_0/d/*")),
    "plaid folder": (
        "plaid",
        "plaid/weights",
        ("model.pt", "embedding_matrix.pt", "noise_schedule.pt", "gamma_bounds.pt"),
    ),
    "published file": ("convergeflow", "published.pt", ("",)),
}
"""Name -> project, folder or file among the golden ones, and what may be damaged in it."""


def make(folder: Path) -> None:
    """Files that are written by libraries: tables of many kinds, and a checkpoint of the published code."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from safetensors.torch import load_file

    texts = [f"Once there was a text with the number {number}." for number in range(60)]
    columns: dict[str, Any] = {
        "text": pa.array(texts),
        "dictionary": pa.array(texts).dictionary_encode(),
        "large": pa.array(texts, pa.large_string()),
        "bytes": pa.array([text.encode() for text in texts]),
        "broken": pa.array([b"\xff\xfe" + text.encode() for text in texts]).view(pa.string()),
        "numbers": pa.array(range(60)),
        "lists": pa.array([[text] for text in texts]),
        "structs": pa.array([{"text": text} for text in texts]),
        "nothing": pa.nulls(60),
        "gaps": pa.array([None if number % 3 else text for number, text in enumerate(texts)]),
        "controls": pa.array(["\x00\x1b[31m\u202e\ud7ff" + text for text in texts]),
    }
    for name, column in columns.items():
        for codec in ("none", "snappy", "zstd") if name == "text" else ("snappy",):
            file = folder / f"{name}{'' if codec == 'snappy' else '-' + codec}.parquet"
            pq.write_table(pa.table({"text": column}), file, row_group_size=16, compression=codec)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), folder / "empty.parquet")
    pq.write_table(pa.table({"\x1b[31mother": pa.array(texts)}), folder / "column.parquet")
    state = load_file(GOLDEN / "langflow_tiny/model.safetensors")
    options = argparse.Namespace(block_size=24)
    torch.save({"model": state, "ema": state, "args": options}, folder / "published.pt")


def place(root: Path, made: Path, group: str, source: str) -> None:
    """What a case of a group reads."""
    if group in ("generate", "inspect", "sweep", "evaluate"):
        shutil.copytree(SHIPPED, root / "model")
        (root / "model/manifest.json").unlink()
    if group == "import":
        shutil.copytree(GOLDEN / "langflow_tiny", root / "langflow")
    if group == "parquet":
        shutil.copy(made / source, root / "text.parquet")
    if group == "hub":
        for name in ("train/0000", "train/0001", "test/0000"):
            (root / "hub/plain_text" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(made / source, root / f"hub/plain_text/{name}.parquet")
        (root / "hub/README.md").write_text("---\nconfigs: []\n---\n")
    if group == "peers":
        there = PEERS / CHECKPOINTS[source][1]
        there = there if there.exists() else made / there.name
        (shutil.copytree if there.is_dir() else shutil.copy)(there, root / "peer")
    (root / "samples.jsonl").write_text("".join(json.dumps({**LINE, "seed": n}) + "\n" for n in range(3)))
    (root / "text.txt").write_text("Once there was a text.\n" * 60)
    (root / "text.jsonl").write_text('{"text": "Once there was a text."}\n' * 60)
    (root / "record.json").write_text(json.dumps(RECORD))
    (root / "recipe.yaml").write_text("corpus: {name: stories}\nmodel: {size: test}\nbatch: 4\nstages: []\n")
    shape = "{'descr': '<f8', 'fortran_order': False, 'shape': (1, 4, 8), }".ljust(117).encode() + b"\n"
    (root / "noise.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(shape).to_bytes(2, "little") + shape + bytes(256))


# --- damage ---


def damage(path: Path, kind: str, number: int) -> None:
    """Change one thing of a file; `number` says which."""
    if kind == "rename":
        target = path.parent / NAMES[number % len(NAMES)]
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    elif kind == "link":
        path.unlink()
        path.symlink_to(("/nowhere", path.name, ".")[number % 3])
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(damaged(path.read_bytes(), kind, number))


NAMES = (
    *("train-00000-of-00009.parquet", "train-00000-of-99999999999999999999.parquet", "0000.parquet.tmp", "train.py"),
    *("\x1b[31m.parquet", "٣.parquet", "-1.parquet", "other/0000.parquet", "train/train/0000.parquet", ".parquet"),
)
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 1e400, float("nan"), "x", "", "\x1b[31m", "${x}", [], {}, [[]], 10**30, 2**63, 1 << 20),
    *(0.5, "1", "9" * 5000, {"a": 1}, [1, 2]),
)


def damaged(content: bytes, kind: str, number: int) -> bytes:
    """A file with one thing wrong."""
    if kind in BYTES:
        return BYTES[kind](content, number)
    try:
        return STRUCTURED[kind](content, number)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, zipfile.BadZipFile, yaml.YAMLError):
        return BYTES["flip"](content, number)  # the file is not of that kind


def _at(content: bytes, number: int) -> int:
    """A place: near the beginning, near the end (where archives and tables keep what they hold), or anywhere."""
    size = len(content) + 1
    near = (number // 3) % min(size, 4096)
    return (near, size - 1 - near, (number // 3) % size)[number % 3]


def _flip(content: bytes, number: int) -> bytes:
    at = _at(content, number)
    return content[:at] + bytes([(content[at : at + 1] or b"\0")[0] ^ (1 << number % 8)]) + content[at + 1 :]


def _insert(content: bytes, number: int) -> bytes:
    at = _at(content, number)
    return content[:at] + (b"\xff\x00\x1b", b"NaN", b"[[[", b"9" * 400)[number % 4] + content[at:]


def _overwrite(content: bytes, number: int) -> bytes:
    at = _at(content, number)
    much = (b"\xff" * 8, b"\x00" * 8, b"\x7f\xff\xff\xff", b"\x80" * 10)[number % 4]
    return content[:at] + much + content[at + len(much) :]


BYTES: dict[str, Callable[[bytes, int], bytes]] = {
    "cut": lambda content, number: content[: _at(content, number)],
    "flip": _flip,
    "insert": _insert,
    "overwrite": _overwrite,
    "empty": lambda content, number: b"",
    "repeat": lambda content, number: content + content,
    "nest": lambda content, number: (b"[", b'{"a":', b"- ", b"((")[number % 4] * 20_000,
    "same": lambda content, number: content,
}


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from _paths(each, (*path, key))


def _changed(value: Any, number: int) -> Any:
    """A document in which one value, at any depth, is another, or is gone."""
    paths = list(_paths(value))
    if not paths:
        return ODD[number % len(ODD)]
    *outer, last = paths[number // 32 % len(paths)]
    inside = value
    for key in outer:
        inside = inside[key]
    if number % 32 < len(ODD):
        inside[last] = ODD[number % 32]
    else:
        del inside[last]
    return value


def _value(content: bytes, number: int) -> bytes:
    try:
        return json.dumps(_changed(json.loads(content), number)).encode()
    except ValueError:
        return yaml.safe_dump(_changed(yaml.safe_load(content), number)).encode()


def _header(content: bytes, number: int) -> bytes:
    """A safetensors file whose list of tensors says something else."""
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(_changed(json.loads(content[8 : 8 + size]), number)).encode()
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def _inside(content: bytes, number: int) -> bytes:
    """A torch archive whose pickle is damaged, with the right checksum."""
    return _zipped(content, lambda name, data: _some(data, number) if name.endswith("data.pkl") else data)


def _some(data: bytes, number: int) -> bytes:
    return BYTES[("flip", "overwrite", "insert", "cut")[number % 4]](data, number // 4)


def _archive(content: bytes, number: int) -> bytes:
    """An archive that lacks a part, names one otherwise, or has another in its place."""
    count = len(zipfile.ZipFile(io.BytesIO(content)).namelist())
    seen = iter(range(count))

    def change(name: str, data: bytes) -> bytes | None:
        if next(seen) != number // 8 % count:
            return data
        return (None, b"", data[:-1], data * 2, b"\xff" * len(data), data[::-1], b"little", None)[number % 8]

    return _zipped(content, change)


def _zipped(content: bytes, change: Callable[[str, bytes], bytes | None]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(target, "w") as made:
        for entry in source.infolist():
            data = change(entry.filename, source.read(entry))
            if data is not None:
                made.writestr(entry.filename, data)
    return target.getvalue()


STRUCTURED: dict[str, Callable[[bytes, int], bytes]] = {
    "value": _value,
    "header": _header,
    "inside": _inside,
    "archive": _archive,
}
