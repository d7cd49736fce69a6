"""Reads the checkpoints that the paper's published code writes: one `.pt` file with "model" and "ema" weights.

The network inside has LangFlow's names. The file is a torch archive, so it is opened with `weights_only=True`: tensors
and plain containers are read, and the one class it also holds (argparse's Namespace, the run's options) is allowed by
name; anything else is refused unread. The file carries no configuration; every size follows from the tensors.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.interop.langflow import model_from_weights
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel

WEIGHTS = {"ema": "ema", "raw": "model"}
"""Our word -> the key in the file. The paper's own evaluation script reads the raw weights."""


def load_published(file: str | Path, *, weights: str = "ema", length: int | None = None) -> ConvergeFlowModel:
    """The model of a published checkpoint; without a `length` the run's is used, or 1024."""
    if weights not in WEIGHTS:
        raise UserError(f"`weights` must be one of {', '.join(WEIGHTS)}, not {weights!r}")
    archive = _open(Path(file).expanduser())
    state = _state(archive, WEIGHTS[weights], file)
    if length is None:
        length = int(getattr(archive.get("args"), "block_size", None) or 1024)
    return model_from_weights(state, _config(state, length, file), f"{file} ({weights})")


def _open(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise UserError(f"there is no file {file}")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            # Mapped, not read: the optimizer's state is twice the size of the model and is never touched.
            archive = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    # Depending on what is wrong torch raises unpickling, runtime, value, key or end-of-file errors.
    except Exception as error:
        forbidden = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it holds {forbidden[1]}, and reading that would run code" if forbidden else "it is no torch archive"
        raise UserError(f"{file} is refused: {reason}; only tensors and plain containers are read") from None
    if not isinstance(archive, Mapping) or not {"model", "ema"} & set(archive):
        raise UserError(f'{file} is not a checkpoint of the published code: it has neither "model" nor "ema"')
    return archive


def _state(archive: Mapping[str, Any], key: str, file: str | Path) -> dict[str, Tensor]:
    state = archive.get(key)
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        others = [word for word, name in WEIGHTS.items() if name in archive and name != key]
        hint = f"; try `weights` {others[0]}" if others else ""
        raise UserError(f'{file} has no weights under "{key}"{hint}')
    return dict(state)


def _config(state: Mapping[str, Tensor], length: int, file: str | Path) -> ConvergeFlowConfig:
    blocks = {int(found[1]) for name in state if (found := re.match(r"backbone\.blocks\.(\d+)\.", name))}
    try:
        vocabulary, width = state["backbone.vocab_embed.embedding"].shape
        condition_width = state["backbone.sigma_map.mlp.0.bias"].shape[0]
        heads = max(1, width // (2 * state["backbone.rotary_emb.inv_freq"].shape[0]))
    except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        raise UserError(f"{file} does not hold a LangFlow network: {error} is missing or mis-shaped") from None
    return ConvergeFlowConfig(
        vocabulary=vocabulary,
        width=width,
        depth=len(blocks),
        heads=heads,
        condition_width=condition_width,
        length=length,
    )
