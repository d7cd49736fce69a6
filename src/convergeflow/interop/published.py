"""Reads the checkpoints that the paper's published code writes: one `.pt` file with "model" and "ema" weights.

The network inside has LangFlow's names. The file is a torch archive: `torch_file` reads its tensors and plain
containers, and sets the run's options aside. The file carries no configuration; every size follows from the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.interop.langflow import model_from_weights
from convergeflow.interop.layouts import DEFAULT_LENGTH, named_tensors
from convergeflow.interop.plain_pickle import SetAside
from convergeflow.interop.torch_file import plain_values, read_torch_file
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
        aside = archive.get("args")
        options = plain_values(aside.state) if isinstance(aside, SetAside) else None
        given = options.get("block_size") if isinstance(options, dict) else None
        length = given if isinstance(given, int) and given > 0 else DEFAULT_LENGTH
    return model_from_weights(state, _config(state, length, file), f"{file} ({weights})")


def _open(file: Path) -> Mapping[str, Any]:
    archive = read_torch_file(file).value
    if not isinstance(archive, Mapping) or not {"model", "ema"} & set(archive):
        raise UserError(f'{file} is not a checkpoint of the published code: it has neither "model" nor "ema"')
    return archive


def _state(archive: Mapping[str, Any], key: str, file: str | Path) -> dict[str, Tensor]:
    state = archive.get(key)
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        others = [word for word, name in WEIGHTS.items() if name in archive and name != key]
        hint = f"; try `weights` {others[0]}" if others else ""
        raise UserError(f'{file} has no weights under "{key}"{hint}')
    return named_tensors(state, Path(file))


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
