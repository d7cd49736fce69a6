"""Reads the arrays of an Orbax checkpoint (the layout of JAX projects) by tensorstore; there is no pickle in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from convergeflow.errors import ConvergeFlowError, UserError


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
    try:
        metadata = json.loads((folder / "_METADATA").read_text(encoding="utf-8"))
        entries = [[part["key"] for part in entry["key_metadata"]] for entry in metadata["tree_metadata"].values()]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{folder / '_METADATA'} does not describe an Orbax checkpoint") from None
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    found: dict[str, dict[str, Tensor]] = {}
    for path in entries:
        if path[0] not in trees:
            continue
        name = ".".join(map(str, path))
        where = {"driver": "ocdbt", "base": f"file://{folder.resolve()}/", "path": f"{name}/"}
        if not (folder / "manifest.ocdbt").is_file():
            where = {"driver": "file", "path": f"{folder.resolve()}/{name}/"}
        try:
            store = tensorstore.open({"driver": driver, "kvstore": where}, open=True, read=True).result()
            array = np.ascontiguousarray(store.read().result()).astype(np.float32)
        except ValueError as failure:
            reason = str(failure).splitlines()[0][:120]
            raise UserError(f"{folder}: the array {name} cannot be read ({reason})") from None
        found.setdefault(path[0], {})[".".join(map(str, path[1:]))] = torch.from_numpy(array)
    return found
