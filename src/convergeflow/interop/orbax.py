"""Reads the arrays of an Orbax checkpoint (the layout of JAX projects) by tensorstore; there is no pickle in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired

import numpy as np
import torch
from pydantic import StrictInt, StrictStr
from torch import Tensor
from typing_extensions import TypedDict

from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.files import read_json

EXPANSION, MOST_COMPRESSED = 16, 1 << 24
"""Arrays take no more bytes than so many times what their files have, and this: weights hardly compress."""


class _Key(TypedDict):
    key: StrictStr | StrictInt


class _Entry(TypedDict):
    key_metadata: list[_Key]


class _Metadata(TypedDict):
    """What is read of the list of arrays; it holds more."""

    tree_metadata: dict[str, _Entry]
    use_zarr3: NotRequired[bool]


def read_orbax(folder: Path, trees: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Tree -> path in it, joined by dots -> array, for those of `trees` that the checkpoint has."""
    try:
        import tensorstore
    except ImportError:
        raise ConvergeFlowError(
            "Orbax checkpoints are read by tensorstore: pip install 'convergeflow[jax]', or import the torch weights"
        ) from None
    if (folder / "default" / "_METADATA").is_file():
        folder = folder / "default"
    metadata = read_json(folder / "_METADATA", _Metadata, fix="it does not describe an Orbax checkpoint")
    entries = [[part["key"] for part in entry["key_metadata"]] for entry in metadata["tree_metadata"].values()]
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    room = MOST_COMPRESSED + EXPANSION * sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    found: dict[str, dict[str, Tensor]] = {}
    for path in entries:
        if not path or path[0] not in trees:
            continue
        name = ".".join(map(str, path))
        if any(sign in name for sign in "/\\\0"):
            raise UserError(f"{folder}: the array {name!r} has a path for a name")
        where = {"driver": "ocdbt", "base": f"file://{folder.resolve()}/", "path": f"{name}/"}
        if not (folder / "manifest.ocdbt").is_file():
            where = {"driver": "file", "path": f"{folder.resolve()}/{name}/"}
        try:
            store = tensorstore.open({"driver": driver, "kvstore": where}, open=True, read=True).result()
            room -= max(4, store.dtype.numpy_dtype.itemsize) * store.size
            if room < 0:
                raise UserError(f"{folder}: the array {name} claims {tuple(store.shape)}, far more than the files hold")
            array = np.ascontiguousarray(store.read().result()).astype(np.float32)
        except UserError:
            raise
        # The library raises value, key, type and operating system errors for what is damaged.
        except Exception as failure:
            reason = " ".join(str(failure).split())[:120]
            raise UserError(f"{folder}: the array {name} cannot be read ({reason})") from None
        found.setdefault(path[0], {})[".".join(map(str, path[1:]))] = torch.from_numpy(array)
    return found
