"""Finds the weights of another project in a folder or file, and says what the file itself tells about them.

The layouts that the projects published in, told apart by what is there and never by a file's name:

    a hub folder        config.json beside model.safetensors or pytorch_model.bin
    a Lightning file    {state_dict, ema, hyper_parameters, ...}; also the newest of a run's `checkpoints/`
    a SEDD run          checkpoints-meta/checkpoint.pth = {model, ema, step, ...} with .hydra/config.yaml
    ELF, torch          one file checkpoint_N = {params, ema_params1, ...}
    ELF, JAX            a folder checkpoint_N that Orbax wrote
    Plaid               model.pt, embedding_matrix.pt, noise_schedule.pt, gamma_bounds.pt

Moving averages without names are named by the weights beside them: buffers, which have no average, are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.files import read_json, read_yaml
from convergeflow.interop.plain_pickle import SetAside
from convergeflow.interop.torch_file import plain_values, read_torch_file
from convergeflow.systems.hub import asked_once
from convergeflow.systems.protocol import read_tensors

Tensors = dict[str, Tensor]
BUFFER = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
"""The one buffer that these networks store."""
MOST_REPEATED = 1 << 20
"""Bytes of a tensor that repeats its numbers: a few bytes can claim terabytes."""
DEFAULT_LENGTH = 1024
"""Tokens per text where no settings are beside the weights: that of all published models but small ones."""
PLAID_PARTS = ("model", "embedding_matrix", "noise_schedule", "gamma_bounds")
HUB_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
HUB_FILES = [*HUB_WEIGHTS, "config.json", "checkpoint_*", "checkpoint_*/**", "*.ckpt", "*.pt", "tokenizer*"]


@dataclass(frozen=True)
class Found:
    """Weights by their authors' names, and what is said about them."""

    place: str
    layout: str
    raw: Tensors | None
    average: Tensors | list[Any] | None
    """By name, or as a list in the order of the parameters."""
    config: dict[str, Any] = field(default_factory=dict)
    """The project's own settings; empty where the layout has none."""
    aside: frozenset[str] = frozenset()

    def weights(self, which: str) -> Tensors:
        """The raw or the averaged weights."""
        chosen = self.average if which == "ema" else self.raw
        if chosen is None:
            there = "ema" if self.raw is None else "raw"
            raise UserError(f"{self.place} ({self.layout}) holds only the {there} weights: give `weights` {there}")
        return chosen if isinstance(chosen, dict) else self._named(chosen)

    def _named(self, listed: list[Any]) -> Tensors:
        assert self.raw is not None, "a list of averages stands beside the weights"
        names = [name for name in self.raw if not BUFFER.search(name)]
        if len(listed) != len(names):
            raise UserError(f"{self.place}: the average has {len(listed)} tensors for {len(names)} parameters")
        average = dict(self.raw)
        for name, tensor in zip(names, listed, strict=True):
            if not isinstance(tensor, Tensor) or tensor.shape != self.raw[name].shape:
                shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise UserError(f"{self.place}: the average of {name} is {shape}, not {tuple(self.raw[name].shape)}")
            average[name] = tensor
        return average


def find(source: str | Path, *, revision: str | None = None) -> Found:
    """The weights in a folder, a file, or a hub repository `owner/name` (which is downloaded)."""
    place = Path(source).expanduser()
    if not place.exists():
        place = _download(str(source), revision)
    return _in_folder(place) if place.is_dir() else _in_file(place)


def _download(name: str, revision: str | None) -> Path:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"{name!r} is neither a file, a folder nor a hub repository of the form owner/name")
    from huggingface_hub import snapshot_download

    try:
        how = asked_once(name, revision)
        return Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES, **how))
    # The hub client raises its own, httpx's and operating system errors; to the user they are one thing.
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConvergeFlowError(
            f"no file or folder {name!r}, and the hub repository of that name could not be read: {reason[0]}"
        ) from error


# -- folders -----------------------------------------------------------------------------------------------------------


def _in_folder(folder: Path) -> Found:
    if (folder / "config.json").is_file() and any((folder / name).is_file() for name in HUB_WEIGHTS):
        return _hub_folder(folder)
    if (folder / "checkpoints-meta" / "checkpoint.pth").is_file():
        return _in_file(folder / "checkpoints-meta" / "checkpoint.pth")
    for place in (folder, folder / "weights"):
        if all((place / f"{part}.pt").is_file() for part in PLAID_PARTS):
            return _plaid_folder(place)
    if (folder / "_METADATA").is_file() or (folder / "default" / "_METADATA").is_file():
        return _orbax_folder(folder)
    return _only_checkpoint(folder)


def _only_checkpoint(folder: Path) -> Found:
    """The one checkpoint of a run's folder, or its last one."""
    for last in (folder / "checkpoints" / "last.ckpt", folder / "last.ckpt"):
        if last.is_file():
            return _in_file(last)
    inside = [*folder.glob("*.ckpt"), *folder.glob("checkpoints/*.ckpt")]
    numbered = [*folder.glob("checkpoint_*"), *folder.glob("*/checkpoint_*")]
    inside += [path for path in numbered if re.fullmatch(r"checkpoint_\d+", path.name)]
    if len(inside) == 1:
        return _in_folder(inside[0]) if inside[0].is_dir() else _in_file(inside[0])
    if inside:
        names = ", ".join(sorted(str(path.relative_to(folder)) for path in inside))
        raise UserError(f"{folder} holds several checkpoints ({names}): name one of them")
    parts = [f"{part}.pt" for part in PLAID_PARTS if (folder / f"{part}.pt").is_file()]
    if parts:
        missing = [f"{part}.pt" for part in PLAID_PARTS if f"{part}.pt" not in parts]
        raise UserError(f"{folder} has {', '.join(parts)} of a Plaid model, but not {', '.join(missing)}")
    if (folder / "config.json").is_file():
        raise UserError(f"{folder} has a config.json, but neither {' nor '.join(HUB_WEIGHTS)}")
    raise UserError(f"{folder} holds no checkpoint in a layout that is known (see `convergeflow import --help`)")


def _hub_folder(folder: Path) -> Found:
    config = read_json(folder / "config.json", dict[str, Any], finite=False)
    weights = folder / HUB_WEIGHTS[0]
    if weights.is_file():
        return Found(str(folder), "hub folder", None, read_tensors(weights), config)
    contents = read_torch_file(folder / HUB_WEIGHTS[1])
    tensors = named_tensors(contents.value, folder / HUB_WEIGHTS[1])
    return Found(str(folder), "hub folder", None, tensors, config, frozenset(contents.aside))


def _plaid_folder(folder: Path) -> Found:
    tensors: Tensors = {}
    for part in PLAID_PARTS:
        path = folder / f"{part}.pt"
        tensors |= {f"{part}.{name}": value for name, value in named_tensors(read_torch_file(path).value, path).items()}
    return Found(str(folder), "Plaid folder", None, tensors)


def _orbax_folder(folder: Path) -> Found:
    from convergeflow.interop.orbax import read_orbax

    trees = read_orbax(folder, ("params", "ema_params1"))
    return Found(str(folder), "Orbax folder", trees.get("params"), trees.get("ema_params1"))


# -- files -------------------------------------------------------------------------------------------------------------


def _in_file(path: Path) -> Found:
    if path.suffix == ".safetensors":
        raise UserError(f"{path} is one file of a hub folder: give the folder, whose config.json is needed too")
    contents = read_torch_file(path)
    value, aside = contents.value, frozenset(contents.aside)
    if not isinstance(value, Mapping):
        raise UserError(f"{path} holds no named weights")
    if "state_dict" in value:
        raw = named_tensors(_without_compilation(value["state_dict"]), path)
        config = _settings(value.get("hyper_parameters")) or _hydra_settings(path)
        return Found(str(path), "Lightning file", raw, _average(value.get("ema"), path), config, aside)
    if "model" in value and "ema" in value:
        raw = named_tensors(_without_compilation(value["model"]), path)
        return Found(str(path), "SEDD run", raw, _average(value["ema"], path), _hydra_settings(path), aside)
    if "params" in value:
        raw = named_tensors(value["params"], path)
        average = value.get("ema_params1")
        return Found(str(path), "ELF file", raw, None if average is None else named_tensors(average, path), {}, aside)
    names = [name[:60] for name in value if isinstance(name, str)][:6]
    raise UserError(f"{path} is no checkpoint in a known layout: it holds {', '.join(names) or 'no names'}")


def _average(ema: Any, path: Path) -> list[Any] | None:
    if ema is None:
        return None
    if isinstance(ema, Mapping) and isinstance(ema.get("shadow_params"), list):
        return list(ema["shadow_params"])
    raise UserError(f"{path}: the average under `ema` is not in the form {{decay, num_updates, shadow_params}}")


def _without_compilation(state: Any) -> Any:
    """Names without the `_orig_mod` that torch.compile puts into them."""
    if not isinstance(state, Mapping):
        return state
    renamed = {re.sub(r"(^|\.)_orig_mod(?=\.)", "", str(name)).lstrip("."): value for name, value in state.items()}
    return renamed if len(renamed) == len(state) else state


def named_tensors(value: Any, path: Path) -> Tensors:
    """A dictionary of tensors, or an error that names what is none."""
    if not isinstance(value, Mapping):
        raise UserError(f"{path}: the weights are a {type(value).__name__}, not named tensors")
    for name, tensor in value.items():
        if not isinstance(name, str):
            raise UserError(f"{path}: a tensor is named by a {type(name).__name__}")
        if not isinstance(tensor, Tensor):
            kind = tensor.name if isinstance(tensor, SetAside) else type(tensor).__name__
            raise UserError(f"{path}: {name} is a {kind}, not a tensor")
        if tensor.numel() * tensor.element_size() > max(MOST_REPEATED, tensor.untyped_storage().nbytes()):
            raise UserError(f"{path}: {name} repeats few numbers until they are {tuple(tensor.shape)}")
    return dict(value)


def _settings(hyper_parameters: Any) -> dict[str, Any]:
    """The run's settings in a Lightning file, if they are there."""
    plain = plain_values(hyper_parameters)
    config = plain.get("config", plain) if isinstance(plain, dict) else {}
    return config if isinstance(config, dict) else {}


def _hydra_settings(path: Path) -> dict[str, Any]:
    """The run's settings beside a file of the run, if they are there."""
    file = path.parent.parent / ".hydra" / "config.yaml"
    if not file.is_file():
        return {}
    config = read_yaml(file)
    return config if isinstance(config, dict) else {}
