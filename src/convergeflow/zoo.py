"""Models by name: those that ship with the package, checkpoint folders, and training runs.

A run folder stands for its exported model or, before that, for its newest whole checkpoint with averaged weights. A
folder with a manifest is checked against it before anything is read. Files are safetensors and JSON; nothing is ever
unpickled.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convergeflow import files
from convergeflow.errors import UserError, unknown_name
from convergeflow.systems import class_of_type
from convergeflow.systems.hub import named_on_hub
from convergeflow.training import checkpoint

if TYPE_CHECKING:
    from convergeflow.systems.protocol import LanguageModel

DEFAULT_MODEL = "stories-small"


def shipped_folder() -> Path:
    """Where the models of the package lie."""
    return Path(str(resources.files("convergeflow"))) / "checkpoints"


def shipped_models() -> list[str]:
    """Names of the models that ship with the package."""
    folder = shipped_folder()
    return sorted(path.parent.name for path in folder.glob("*/config.json")) if folder.is_dir() else []


def locate(name: str | Path, *, average: bool = True) -> Path:
    """The checkpoint folder of a shipped name, a folder, a training run, or the hub's hf:owner/name[@revision].

    An exported model has the average alone.
    """
    if not isinstance(name, str | Path):
        raise UserError(f"a model is given by its name or folder, not by {type(name).__name__}")
    if (fetched := named_on_hub(str(name))) is not None:
        return fetched
    shipped = shipped_folder() / str(name)
    if str(name) in shipped_models():
        return shipped
    path = Path(name)
    if not path.exists():
        if "/" in str(name) or str(name).startswith("."):
            raise UserError(
                f"{name} does not exist: give a checkpoint folder, hf:owner/name, or one of "
                + ", ".join(shipped_models())
            )
        raise unknown_name("model", str(name), shipped_models())
    if average and (path / checkpoint.MODEL_FOLDER / "config.json").is_file():
        return path / checkpoint.MODEL_FOLDER
    if (path / checkpoint.FOLDER).is_dir() and not (path / "config.json").is_file():
        newest = checkpoint.newest_whole(path, lambda message: None)
        if newest is None:
            raise UserError(f"the run {path} holds no whole checkpoint yet")
        return newest
    if not (path / "config.json").is_file():
        raise UserError(f"{path} is not a checkpoint folder: it has no config.json")
    return path


def load_model(
    name: str | Path = DEFAULT_MODEL, *, average: bool = True, device: str = "auto", dtype: Any = None
) -> LanguageModel:
    """A model ready to use, with its tokenizer if the folder holds one; `dtype` is float32 or float64."""
    # Finding models must not load torch; loading one does.
    from convergeflow.device import choose_device, precision_of
    from convergeflow.systems.config import read_config
    from convergeflow.systems.protocol import read_tensors

    folder = locate(name, average=average)
    if not average and not (folder / "ema.safetensors").is_file():
        raise UserError(
            f"{folder} holds one set of weights: leave `weights` out, or name a run or one of its checkpoints"
        )
    if (folder / checkpoint.MANIFEST).is_file():
        checkpoint.verify(folder)
    model = class_of_type(read_config(folder)["model_type"]).from_pretrained(folder, dtype=dtype)
    if average and (folder / "ema.safetensors").is_file():
        model.load_strictly(read_tensors(folder / "ema.safetensors"), folder)
    model.to(choose_device(device).device)
    return model.double() if precision_of(model.device).trunk.itemsize == 8 else model


def trained_on(name: str | Path, length: int) -> str | None:
    """The folder of the prepared corpus that a model was trained on, if the run names it and it is still there.

    Samples of `length` tokens can be held against it; longer ones than its sequences cannot.
    """
    from convergeflow.data.corpus import Corpus

    noted = locate(name) / "run.json"
    values = files.read_json(noted) if noted.is_file() else {}
    section = values.get("corpus") if isinstance(values, dict) else None
    folder = section.get("name") if isinstance(section, dict) else None
    if not isinstance(folder, str) or not (Path(folder) / "manifest.json").is_file():
        return None
    return folder if Corpus.open(folder).length >= length else None


def weights_hash(folder: Path) -> str:
    """SHA-256 of the weights, shortened: which model made a sample."""
    return files.file_hash(folder / "model.safetensors")[:16]
