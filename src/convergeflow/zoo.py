"""Models by name: those that ship with the package, checkpoint folders, and training runs.

A run folder stands for its exported model or, before that, for its newest whole checkpoint with averaged weights. A
folder with a manifest is checked against it before anything is read. Files are safetensors and JSON; nothing is ever
unpickled.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

from convergeflow.data.tokenizer import Tokenizer
from convergeflow.device import choose_device
from convergeflow.errors import UserError, unknown_name
from convergeflow.training import checkpoint

DEFAULT_MODEL = "stories-small"


def shipped_folder() -> Path:
    """Where the models of the package lie."""
    return Path(str(resources.files("convergeflow"))) / "checkpoints"


def shipped_models() -> list[str]:
    """Names of the models that ship with the package."""
    folder = shipped_folder()
    return sorted(path.parent.name for path in folder.glob("*/config.json")) if folder.is_dir() else []


def locate(name: str | Path) -> Path:
    """The checkpoint folder of a shipped name, a folder, or a training run."""
    shipped = shipped_folder() / str(name)
    if str(name) in shipped_models():
        return shipped
    path = Path(name)
    if not path.exists():
        if "/" in str(name) or str(name).startswith("."):
            raise UserError(f"{name} does not exist: give a checkpoint folder or one of {', '.join(shipped_models())}")
        raise unknown_name("model", str(name), shipped_models())
    if (path / checkpoint.MODEL_FOLDER / "config.json").is_file():
        return path / checkpoint.MODEL_FOLDER
    if (path / checkpoint.FOLDER).is_dir() and not (path / "config.json").is_file():
        newest = checkpoint.newest_whole(path, lambda message: None)
        if newest is None:
            raise UserError(f"the run {path} holds no whole checkpoint yet")
        return newest
    if not (path / "config.json").is_file():
        raise UserError(f"{path} is not a checkpoint folder: it has no config.json")
    return path


def load_model(name: str | Path = DEFAULT_MODEL, *, average: bool = True, device: str = "auto") -> Any:
    """A model ready to use (a `records.LanguageModel`), with its tokenizer where the folder holds one."""
    from transformers import AutoModel

    import convergeflow.systems.convergeflow  # noqa: F401  (registers the model type with transformers)
    from convergeflow.pretrained import type_of

    folder = locate(name)
    if (folder / checkpoint.MANIFEST).is_file():
        checkpoint.verify(folder)
    kind = type_of(folder)
    if kind != "convergeflow":
        from convergeflow.systems import register

        register(kind)
    model = AutoModel.from_pretrained(folder)
    if average and (folder / "ema.safetensors").is_file():
        model.load_state_dict(checkpoint.read_tensors(folder / "ema.safetensors"))
    if (folder / "tokenizer.json").is_file():
        model.tokenizer = Tokenizer.load(folder)
        if model.tokenizer.size > model.config.vocabulary:
            raise UserError(
                f"the tokenizer in {folder} has {model.tokenizer.size} tokens, the model {model.config.vocabulary}"
            )
    model.eval()
    return model.to(choose_device(device).device)


def weights_hash(folder: Path) -> str:
    """SHA-256 of the weights, shortened: which model made a sample."""
    digest = hashlib.sha256()
    with open(folder / "model.safetensors", "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()[:16]
