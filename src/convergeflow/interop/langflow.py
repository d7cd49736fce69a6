"""Reads checkpoints in LangFlow's layout into our model: names, shapes and schedule values.

A LangFlow checkpoint is a folder (or a hub repository) with `config.json` and `model.safetensors`. Its network is the
one in `model/network.py` under other names, so an import is a renaming and must be complete: a missing, unexpected or
mis-shaped tensor is an error that names it. The noise schedule is read from the weights, because the published
`config.json` carries LangFlow's starting values, not the learned ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel

CUTOFF = 1e-5
"""LangFlow's clamp of the Gumbel quantiles; a constant of its code that is not among the weights."""

_ROTARY = "backbone.rotary_emb.inv_freq"

BLOCK = {
    "norm1.weight": "norm_attention.weight",
    "attn_qkv.weight": "attention.qkv.weight",
    "attn_out.weight": "attention.out.weight",
    "norm2.weight": "norm_mlp.weight",
    "mlp.0.weight": "mlp_up.weight",
    "mlp.0.bias": "mlp_up.bias",
    "mlp.2.weight": "mlp_down.weight",
    "mlp.2.bias": "mlp_down.bias",
    "adaLN_modulation.weight": "modulation.weight",
    "adaLN_modulation.bias": "modulation.bias",
}

OUTSIDE_BLOCKS = {
    "backbone.vocab_embed.embedding": "embedding.weight",
    "backbone.self_cond_proj.weight": "condition_input.weight",
    "backbone.sigma_map.mlp.0.weight": "backbone.noise_level.expand.weight",
    "backbone.sigma_map.mlp.0.bias": "backbone.noise_level.expand.bias",
    "backbone.sigma_map.mlp.2.weight": "backbone.noise_level.project.weight",
    "backbone.sigma_map.mlp.2.bias": "backbone.noise_level.project.bias",
    "backbone.output_layer.norm_final.weight": "backbone.norm_final.weight",
    "backbone.output_layer.adaLN_modulation.weight": "backbone.modulation_final.weight",
    "backbone.output_layer.adaLN_modulation.bias": "backbone.modulation_final.bias",
    "backbone.output_layer.linear.weight": "head.weight",
    "backbone.output_layer.linear.bias": "head.bias",
}

_SCHEDULE = ("proposal.loc", "proposal.scale", "proposal.entropy")


@dataclass(frozen=True)
class Sizes:
    """What fixes every shape of a LangFlow network."""

    vocabulary: int
    width: int
    condition_width: int
    depth: int
    heads: int

    def names(self) -> dict[str, str]:
        """LangFlow's name -> that in `FlowNetwork`, for every tensor."""
        blocks = {
            f"backbone.blocks.{i}.{theirs}": f"backbone.blocks.{i}.{ours}"
            for i in range(self.depth)
            for theirs, ours in BLOCK.items()
        }
        return {**OUTSIDE_BLOCKS, **blocks}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """LangFlow's name -> the shape it must have."""
        V, D, C = self.vocabulary, self.width, self.condition_width
        block: dict[str, tuple[int, ...]] = {
            "norm1.weight": (D,),
            "attn_qkv.weight": (3 * D, D),
            "attn_out.weight": (D, D),
            "norm2.weight": (D,),
            "mlp.0.weight": (4 * D, D),
            "mlp.0.bias": (4 * D,),
            "mlp.2.weight": (D, 4 * D),
            "mlp.2.bias": (D,),
            "adaLN_modulation.weight": (6 * D, C),
            "adaLN_modulation.bias": (6 * D,),
        }
        return {
            "backbone.vocab_embed.embedding": (V, D),
            "backbone.self_cond_proj.weight": (D, 2 * D),
            "backbone.sigma_map.mlp.0.weight": (C, 256),
            "backbone.sigma_map.mlp.0.bias": (C,),
            "backbone.sigma_map.mlp.2.weight": (C, C),
            "backbone.sigma_map.mlp.2.bias": (C,),
            "backbone.output_layer.norm_final.weight": (D,),
            "backbone.output_layer.adaLN_modulation.weight": (2 * D, C),
            "backbone.output_layer.adaLN_modulation.bias": (2 * D,),
            "backbone.output_layer.linear.weight": (V, D),
            "backbone.output_layer.linear.bias": (V,),
            _ROTARY: (D // self.heads // 2,),
            **dict.fromkeys(_SCHEDULE, ()),
            **{f"backbone.blocks.{i}.{name}": shape for i in range(self.depth) for name, shape in block.items()},
        }


def load_langflow(source: str | Path, *, revision: str | None = None) -> ConvergeFlowModel:
    """The model of a LangFlow folder, or of a hub repository `owner/name` (which is downloaded)."""
    config_file, weights_file = _locate(str(source), revision)
    config = _read_config(config_file)
    try:
        weights = load_file(weights_file)
    except SafetensorError as error:
        raise UserError(f"{weights_file} is not a whole safetensors file ({error}); copy it again") from None
    try:
        sizes = Sizes(
            vocabulary=int(config["vocab_size"]),
            width=int(config["hidden_size"]),
            condition_width=int(config["cond_dim"]),
            depth=int(config["n_blocks"]),
            heads=int(config["n_heads"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{config_file} is not a LangFlow configuration: {error!r} is missing or no number") from None
    return model_from_weights(
        weights,
        sizes,
        method="langflow",
        length=int(config.get("model_length", 1024)),
        dropout=float(config.get("dropout", 0.1)),
        cutoff=float(config.get("gumbel_cutoff", CUTOFF)),
        source=str(source),
    )


def _locate(source: str, revision: str | None) -> tuple[Path, Path]:
    folder = Path(source).expanduser()
    if folder.is_dir():
        files = folder / "config.json", folder / "model.safetensors"
        for file in files:
            if not file.is_file():
                raise UserError(f"{folder} has no {file.name}; LangFlow checkpoints have one")
        return files
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise UserError(f"{source!r} is neither a folder nor a hub repository of the form owner/name")
    from huggingface_hub import hf_hub_download

    try:
        config_file, weights_file = (
            Path(hf_hub_download(source, name, revision=revision)) for name in ("config.json", "model.safetensors")
        )
    # The hub client raises its own, httpx's and operating system errors; to the user they are one thing.
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConvergeFlowError(
            f"no folder {source!r}, and the hub repository of that name could not be read: {reason[0]}"
        ) from error
    return config_file, weights_file


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind is None or kind.lower() != "langflow":
        raise UserError(f"{file} describes model_type {kind!r}, not LangFlow; give a LangFlow checkpoint")
    # Each of these switches changes the function that the weights compute; ours has them all on.
    for switch in ("use_normalized_embedding", "self_conditioning", "use_bias"):
        if not config.get(switch, True):
            raise UserError(f"{file} has {switch}=false; only LangFlow checkpoints with {switch} can be imported")
    if config.get("embedding_norm_method", "layernorm") != "layernorm":
        raise UserError(f"{file} normalises its embeddings by {config['embedding_norm_method']!r}, not by 'layernorm'")
    return dict(config)


def model_from_weights(
    weights: Mapping[str, Tensor], sizes: Sizes, *, method: str, length: int, dropout: float, cutoff: float, source: str
) -> ConvergeFlowModel:
    """Our model with the tensors of LangFlow's network; `source` is named in errors."""
    check_names_and_shapes(weights, sizes.shapes(), source)
    _check_rotary(weights[_ROTARY], source)
    loc, scale, entropy = (float(weights[name]) for name in _SCHEDULE)
    if not scale > 0:
        raise UserError(f"{source}: proposal.scale is {scale}; a Gumbel schedule needs a positive scale")
    config = ConvergeFlowConfig(
        vocabulary=sizes.vocabulary,
        width=sizes.width,
        depth=sizes.depth,
        heads=sizes.heads,
        condition_width=sizes.condition_width,
        length=length,
        dropout=dropout,
        schedule={"kind": "gumbel", "loc": loc, "scale": scale, "cutoff": cutoff},
        schedule_entropy=entropy,
        method=method,
    )
    model = ConvergeFlowModel(config)
    state = {ours: weights[theirs].float() for theirs, ours in sizes.names().items()}
    # The one thing of ours that LangFlow does not have; zeros stand for "the training text is not known".
    state["log_unigram"] = torch.zeros(sizes.vocabulary)
    model.network.load_state_dict(state, strict=True)
    return model.eval()


def check_names_and_shapes(weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Refuse weights that are not exactly the expected ones, with the names of those that differ."""
    wrong = [
        f"{name} is {tuple(weights[name].shape)}, not {shape}"
        for name, shape in shapes.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    broken = [name for name in shapes if name in weights and not bool(torch.isfinite(weights[name].float()).all())]
    complaints = [
        _listing("missing", sorted(set(shapes) - set(weights))),
        _listing("unexpected", sorted(set(weights) - set(shapes))),
        _listing("mis-shaped", wrong),
        _listing("not finite", broken),
    ]
    if any(complaints):
        raise UserError(f"{source} is not a whole LangFlow network: " + "; ".join(filter(None, complaints)))


def _listing(kind: str, names: list[str], most: int = 8) -> str:
    if not names:
        return ""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{kind}: {', '.join(names[:most])}{more}"


def _check_rotary(stored: Tensor, source: str) -> None:
    # We compute these frequencies; another base would silently turn every attention pattern.
    half = len(stored)
    ours = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    if not torch.allclose(stored.double(), ours, rtol=1e-4):
        raise UserError(f"{source}: {_ROTARY} does not hold the rotary frequencies of base 10000")
