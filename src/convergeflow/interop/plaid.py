"""Plaid's checkpoint: four torch files with the averaged weights already in them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.interop.layouts import DEFAULT_LENGTH, Found
from convergeflow.interop.renaming import COLUMN, ROW, Renaming, agreed, depth_of, extents, fill
from convergeflow.systems.plaid import PlaidConfig
from convergeflow.systems.protocol import check_sizes
from convergeflow.systems.published.plaid import PublishedPlaid

PLAID_OUTSIDE = {
    "model.input_linear.weight": "network.enter.weight",
    "model.selfcond_linear.weight": "network.enter_condition.weight",
    "model.gamma_linear.weight": "network.enter_gamma.weight",
    "model.output_norm.weight": "network.norm_final.weight",
    "model.output_linear.weight": "network.head.weight",
    "model.output_linear.bias": "network.head.bias",
    "embedding_matrix.matrix": "network.embedding.weight",
    "noise_schedule.W1": "noise_schedule.rate",
    "noise_schedule.b1": "noise_schedule.shift",
    "noise_schedule.W2": "noise_schedule.height",
    "gamma_bounds.bounds": "noise_schedule.bounds",
}
PLAID_BLOCK = {
    "rmsnorm1.weight": "norm_attention.weight",
    "attn_qkv.weight": "qkv.weight",
    "attn_out.weight": "out.weight",
    "rmsnorm2.weight": "norm_mlp.weight",
    "mlp.fc1.weight": "mlp_up.weight",
    "mlp.fc2.weight": "mlp_down.weight",
}
PLAID_ROTARY = "model.rotary_emb.inv_freq"
TABLE = "embedding_matrix.matrix"


def plaid_model(found: Found, which: str, length: int | None) -> PublishedPlaid:
    """The model of Plaid's four files; every size follows from the tensors."""
    if found.layout != "Plaid folder":
        raise UserError(f"{found.place} is a {found.layout}; Plaid's weights are four .pt files in a folder")
    weights = _with_bounds(found)
    depth = depth_of(weights, r"model\.blocks\.(\d+)\.")
    names = {**PLAID_OUTSIDE}
    for i in range(depth):
        names |= {f"model.blocks.{i}.{theirs}": f"network.blocks.{i}.{ours}" for theirs, ours in PLAID_BLOCK.items()}
    renaming = Renaming(names, {"noise_schedule.W1": COLUMN, "noise_schedule.W2": ROW}, PLAID_ROTARY)
    norms = [(f"model.blocks.{i}.rmsnorm{n}.weight", 0) for i in range(depth) for n in (1, 2)]

    def size(what: str, *places: tuple[str, int]) -> int:
        return agreed(extents(weights, places), what, found.place)

    width = size("width", *norms, ("model.output_norm.weight", 0))
    half = size("head width", (PLAID_ROTARY, 0))
    if width % (2 * half):
        raise UserError(f"{found.place} is not this network: mis-shaped: {PLAID_ROTARY} is ({half},) at width {width}")
    tokens = (("model.output_linear.weight", 0), (TABLE, 0))
    config = PlaidConfig(
        vocabulary=size("vocabulary", ("model.output_linear.bias", 0), *tokens),
        width=width,
        depth=max(1, depth),
        heads=width // (2 * half),
        length=length or DEFAULT_LENGTH,
        dropout=0.0,
        dimension=size("dimension", ("model.input_linear.weight", 1), (TABLE, 1), ("model.selfcond_linear.weight", 1)),
        schedule_hidden=size("schedule", ("noise_schedule.W1", 0), ("noise_schedule.b1", 0), ("noise_schedule.W2", 1)),
    )
    check_sizes(config, weights, found.place)
    model = PublishedPlaid(config)
    fill(model, renaming, found, which)
    return model


def _with_bounds(found: Found) -> Mapping[str, Tensor]:
    """The two ends of the schedule as one tensor, as the model holds them."""
    weights = found.weights("ema")
    ends = [weights.pop(name, None) for name in ("gamma_bounds.gamma_0", "gamma_bounds.gamma_1")]
    for name, end in zip(("gamma_0", "gamma_1"), ends, strict=True):
        if end is None:
            raise UserError(f"{found.place} is not this network: missing: gamma_bounds.{name}")
        if end.numel() != 1:
            raise UserError(f"{found.place} is not this network: mis-shaped: gamma_bounds.{name} is {tuple(end.shape)}")
    weights["gamma_bounds.bounds"] = torch.stack([end.reshape(()) for end in ends if end is not None])
    return weights
