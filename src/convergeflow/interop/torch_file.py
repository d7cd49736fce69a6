"""Reads files that `torch.save` wrote: tensors and plain containers, and nothing that would have to be run.

The zip layout (all files since 2020) is read here: the list of contents by `plain_pickle`, the numbers mapped from the
disk when they are used, so that an optimizer's state beside the weights costs nothing. The layout before it goes
through `torch.load` with `weights_only=True`, which refuses foreign objects altogether.
"""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.interop import plain_pickle
from convergeflow.interop.plain_pickle import Name, Refused, SetAside

DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
LOCAL_HEADER = 30
"""Bytes of a zip entry's header before its name."""


@dataclass(frozen=True)
class Contents:
    """What a file holds."""

    value: Any
    aside: set[str] = field(default_factory=set)
    """Names of the foreign classes whose objects were left out."""


@dataclass(frozen=True)
class _Storage:
    """Numbers in the file, of one type."""

    bytes: torch.UntypedStorage
    dtype: torch.dtype


def read_torch_file(path: str | Path) -> Contents:
    """The contents of a file; what is no torch file, is damaged or wants code to run is refused."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        if zipfile.is_zipfile(path):
            return _read_zip(path)
        return _read_before_zip(path)
    except Refused as reason:
        raise Refused(f"{path} is refused: {reason}; only tensors and plain containers are read") from None
    except OSError:  # of the disk, and it says so
        raise
    # A damaged archive fails in many ways: checksums, versions, flags, names, sizes.
    except Exception as failure:
        said = " ".join(str(failure).split())[:120]
        raise Refused(f"{path} is refused: it is damaged ({type(failure).__name__}: {said})") from None


def _read_before_zip(path: Path) -> Contents:
    try:
        return Contents(torch.load(path, map_location="cpu", weights_only=True))
    # Depending on what is wrong torch raises unpickling, runtime, value, key or end-of-file errors.
    except Exception as failure:
        says = str(failure)
        if "GLOBAL" in says:
            raise Refused(f"it holds {says.partition('GLOBAL ')[2].split()[0]}, which would have to be run") from None
        raise Refused("it is no torch file, or a part of one") from None


def _read_zip(path: Path) -> Contents:
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        entries = {entry.filename: entry for entry in archive.infolist()}
        tops = {name.split("/", 1)[0] for name in entries}
        if len(tops) != 1 or f"{(top := tops.pop())}/data.pkl" not in entries:
            raise Refused("it is a zip file, but torch did not write it")
        if f"{top}/constants.pkl" in entries:
            raise Refused("it is a TorchScript program, not weights")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
            raise Refused("its parts are compressed, which torch never does")
        order = archive.read(f"{top}/byteorder") if f"{top}/byteorder" in entries else b"little"
        if order != b"little":
            raise Refused("its numbers are stored big end first")
        whole = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
        kept: dict[str, torch.UntypedStorage] = {}

        def numbers(key: str) -> torch.UntypedStorage:
            if key not in kept:
                entry = entries.get(f"{top}/data/{key}")
                if entry is None:
                    raise Refused(f"it lacks the numbers data/{key}")
                file.seek(entry.header_offset)
                header = file.read(LOCAL_HEADER)
                lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
                start = entry.header_offset + LOCAL_HEADER + lengths
                if start + entry.file_size > path.stat().st_size:
                    raise Refused(f"it ends before the numbers data/{key}")
                kept[key] = whole[start : start + entry.file_size]
            return kept[key]

        value, aside = plain_pickle.read(archive.read(f"{top}/data.pkl"), TENSORS, _opener(numbers))
    return Contents(value, aside)


def _opener(numbers: Callable[[str], torch.UntypedStorage]) -> Callable[[Any], _Storage]:
    def stored(reference: Any) -> _Storage:
        if not (isinstance(reference, tuple) and len(reference) == 5 and reference[0] == "storage"):
            raise Refused("it refers to something other than numbers")
        _, kind, key, _, count = reference
        if not isinstance(kind, Name):
            raise Refused("it stores numbers of a type without a name")
        if kind.module not in ("torch", "torch.storage") or kind.attribute not in DTYPES:
            raise Refused(f"it stores numbers of the unknown type {kind}")
        dtype = DTYPES[kind.attribute]
        found = numbers(str(key))
        if found.nbytes() != int(count) * dtype.itemsize:
            raise Refused(f"the numbers data/{key} are not as many as it says")
        return _Storage(found, dtype)

    return stored


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    if not isinstance(storage, _Storage):
        raise Refused("a tensor has no numbers")
    shape, steps = [int(n) for n in size], [int(n) for n in stride]
    last = offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) if 0 not in shape else -1
    if offset < 0 or min(shape, default=0) < 0 or min(steps, default=0) < 0:
        raise Refused("a tensor has a negative size")
    if (last + 1) * storage.dtype.itemsize > storage.bytes.nbytes():
        raise Refused("a tensor is larger than its numbers")
    return torch.empty(0, dtype=storage.dtype).set_(storage.bytes, offset, shape, steps)


TENSORS: dict[str, plain_pickle.Make] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._tensor._rebuild_from_type_v2": lambda make, kind, arguments, state: _from_type(make, arguments),
    "torch.Size": lambda sizes=(): tuple(sizes),
    "torch.device": lambda *where: "cpu",
    "torch.serialization._get_layout": lambda name: name,
}
"""How torch writes tensors, answered by functions of ours."""


def _from_type(make: Any, arguments: Any) -> Tensor:
    if not isinstance(make, Name) or str(make) not in TENSORS:
        raise Refused(f"it makes a tensor by a {type(make).__name__}")
    made: Tensor = TENSORS[str(make)](*arguments)
    return made


MOST_SETTINGS, MOST_TEXT, MOST_DEPTH = 100_000, 10_000, 32
"""No run has more settings, longer ones or deeper ones; a file in which parts hold each other may seem to."""


def plain_values(value: Any) -> Any:
    """The settings in objects of omegaconf and Lightning that were set aside, as plain containers; others stay."""
    left = itertools.count(MOST_SETTINGS, -1)

    def plain(value: Any, depth: int) -> Any:
        if next(left) <= 0:
            raise Refused("its settings have no end")
        if depth == 0:
            return None  # a file may hold a circle
        if isinstance(value, SetAside) and value.name.startswith("omegaconf."):
            state = value.state if isinstance(value.state, dict) else {}
            return plain(state["_val"] if "_val" in state else state.get("_content"), depth - 1)
        if isinstance(value, SetAside) and value.items:  # a dictionary under another name, as Lightning has
            value = value.items
        if isinstance(value, dict):
            return {key: plain(item, depth - 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item, depth - 1) for item in value]
        return None if isinstance(value, (str, bytes)) and len(value) > MOST_TEXT else value

    return plain(value, MOST_DEPTH)
