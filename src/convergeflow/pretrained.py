"""Strict loading of transformers folders, for our model and every rival.

transformers only warns about missing weights, keeps files in half precision as they are, and draws bars of its own.
Here a missing, unexpected or mis-shaped weight is an error that names it, and everything is computed in float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging

from convergeflow.errors import UserError


def load_strictly(cls: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' own loading for `cls`, with every weight that does not fit an error."""
    check_type(folder, cls.config_class.model_type)
    kwargs.setdefault("dtype", torch.float32)  # files in half precision are for shipping, not for computing
    wanted_info = kwargs.pop("output_loading_info", False)
    with quietly():
        load = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
        try:
            model, info = load(cls, folder, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs)
        except SafetensorError as damage:
            raise UserError(f"{folder}/model.safetensors is damaged ({damage}): copy or train it again") from None
    problems = [
        f"{word} {key if isinstance(key, str) else key[0]}"
        for word, name in (
            ("missing", "missing_keys"),
            ("unexpected", "unexpected_keys"),
            ("mis-shaped", "mismatched_keys"),
            ("failed", "error_msgs"),
        )
        for key in sorted(info.get(name) or (), key=str)
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"{folder} does not hold this model: {', '.join(problems[:3])}{more} (do the vocabulary and the sizes in "
            "config.json belong to these weights?)"
        )
    model.eval()
    return (model, info) if wanted_info else model


def check_type(folder: Any, model_type: str) -> None:
    """Refuse a folder that holds another kind of model; a name that is no folder is left to transformers."""
    path = Path(str(folder))
    if not path.exists():
        return
    found = type_of(path)
    if found != model_type:
        raise UserError(
            f"{path} holds a model of type {found!r}, not {model_type!r} (see `convergeflow import --help`)"
        )


def type_of(folder: Path) -> str:
    """The model type named in a folder's config.json."""
    config = folder / "config.json"
    if not config.is_file():
        raise UserError(f"{folder} is not a checkpoint folder: it has no config.json")
    try:
        found = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError):
        raise UserError(f"{config} is not valid JSON") from None
    if not isinstance(found, str):
        raise UserError(f"{config} names no model_type")
    return found


@contextmanager
def quietly() -> Iterator[None]:
    """Without transformers' bars and load reports: what is wrong is said once, by us."""
    had_bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()
