"""Reads checkpoints in LangFlow's layout into our model: names, shapes and schedule values.

A LangFlow checkpoint is a folder (or a hub repository) with `config.json` and `model.safetensors`. Its network is the
one in `model/network.py` under other names, so an import is a renaming and must be complete: a missing, unexpected or
mis-shaped tensor is an error that names it. The noise schedule is read from the weights, because the published
`config.json` carries LangFlow's starting values, not the learned ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field, StrictInt
from torch import Tensor

from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.files import check_type, read_json
from convergeflow.model.network import FlowNetwork, Shape
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel
from convergeflow.systems.hub import asked_once
from convergeflow.systems.protocol import check_sizes, listing, misfits, read_tensors

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


_SIZES = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "condition_width": "cond_dim",
    "depth": "n_blocks",
    "heads": "n_heads",
}


class _Values(BaseModel):
    """What is read of LangFlow's config.json; it holds more."""

    vocab_size: StrictInt
    hidden_size: StrictInt
    cond_dim: StrictInt
    n_blocks: StrictInt
    n_heads: StrictInt
    model_length: StrictInt = 1024
    dropout: float = Field(0.1, ge=0, lt=1)
    gumbel_cutoff: float = Field(CUTOFF, gt=0, lt=0.5)


def load_langflow(source: str | Path, *, revision: str | None = None) -> ConvergeFlowModel:
    """The model of a LangFlow folder, or of a hub repository `owner/name` (which is downloaded)."""
    config_file, weights_file = _locate(str(source), revision)
    try:
        values = check_type(_read_config(config_file), _Values)
        sizes = {ours: getattr(values, theirs) for ours, theirs in _SIZES.items()}
        length, dropout = values.model_length, values.dropout
        config = ConvergeFlowConfig(**sizes, length=length, dropout=dropout, method="langflow")
    except UserError as error:
        if str(config_file) in str(error):
            raise
        raise UserError(f"{config_file} is not a LangFlow configuration: {error}") from None
    weights = read_tensors(weights_file)
    check_sizes(config, weights, config_file)
    return model_from_weights(weights, config, str(source), cutoff=values.gumbel_cutoff)


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
        how = asked_once(source, revision)
        config_file, weights_file = (
            Path(hf_hub_download(source, name, revision=revision, **how))
            for name in ("config.json", "model.safetensors")
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
        config = read_json(file)
    except UserError as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind.lower() != "langflow":
        raise UserError(f"{file} describes model_type {kind!r}, not LangFlow; give a LangFlow checkpoint")
    # Each of these switches changes the function that the weights compute; ours has them all on.
    for switch in ("use_normalized_embedding", "self_conditioning", "use_bias"):
        if not config.get(switch, True):
            raise UserError(f"{file} has {switch}=false; only LangFlow checkpoints with {switch} can be imported")
    if config.get("embedding_norm_method", "layernorm") != "layernorm":
        raise UserError(f"{file} normalises its embeddings by {config['embedding_norm_method']!r}, not by 'layernorm'")
    return dict(config)


def model_from_weights(
    weights: Mapping[str, Tensor], config: ConvergeFlowConfig, source: str, *, cutoff: float = CUTOFF
) -> ConvergeFlowModel:
    """Our model of the given sizes with the tensors of LangFlow's network; `source` is named in errors."""
    names = OUTSIDE_BLOCKS | {
        f"backbone.blocks.{i}.{theirs}": f"backbone.blocks.{i}.{ours}"
        for i in range(config.depth)
        for theirs, ours in BLOCK.items()
    }
    _check(weights, names, config, source)
    loc, scale, entropy = (float(weights[name]) for name in _SCHEDULE)
    if not scale > 0:
        raise UserError(f"{source}: proposal.scale is {scale}; a Gumbel schedule needs a positive scale")
    schedule = {"kind": "gumbel", "loc": loc, "scale": scale, "cutoff": cutoff}
    model = ConvergeFlowModel(replace(config, schedule=schedule, schedule_entropy=entropy))
    state = {ours: weights[theirs].float() for theirs, ours in names.items()}
    # LangFlow has no word frequencies; zeros mean that the training text is not known.
    state["log_unigram"] = torch.zeros(config.vocabulary)
    model.network.load_state_dict(state, strict=True)
    return model.eval()


def _check(weights: Mapping[str, Tensor], names: Mapping[str, str], config: ConvergeFlowConfig, source: str) -> None:
    """Refuse weights that are not exactly LangFlow's, with the names of those that differ."""
    with torch.device("meta"):  # shapes alone
        own = FlowNetwork(config.part(Shape)).state_dict()
    half = config.width // config.heads // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    expected = {theirs: own[ours] for theirs, ours in names.items()}
    expected |= {_ROTARY: frequencies, **dict.fromkeys(_SCHEDULE, torch.zeros(()))}
    broken = [name for name in expected if name in weights and not bool(torch.isfinite(weights[name].float()).all())]
    complaints = [misfits(expected, weights), listing("not finite", broken) if broken else ""]
    if any(complaints):
        raise UserError(f"{source} is not a whole LangFlow network: " + "; ".join(filter(None, complaints)))
    # We compute these frequencies; another base would silently turn every attention pattern.
    if not torch.allclose(weights[_ROTARY].double(), frequencies, rtol=1e-4):
        raise UserError(f"{source}: {_ROTARY} does not hold the rotary frequencies of base 10000")
