"""ELF's checkpoints: one torch file, or a folder that Orbax wrote. The average has names in both."""

from __future__ import annotations

from collections.abc import Callable

from convergeflow.errors import UserError
from convergeflow.interop.layouts import DEFAULT_LENGTH, Found
from convergeflow.interop.renaming import TRANSPOSED, Renaming, agreed, depth_of, extents, fill
from convergeflow.systems.protocol import check_sizes
from convergeflow.systems.published.elf import PublishedElf, PublishedElfConfig

ELF_OUTSIDE = {
    "self_cond_proj.weight": "join.weight",
    "self_cond_proj.bias": "join.bias",
    "text_proj.proj1.weight": "narrow.weight",
    "text_proj.proj2.weight": "widen.weight",
    "text_proj.proj2.bias": "widen.bias",
    **{
        f"{theirs}.mlp_{number}.{kind}": f"{ours}.{layer}.{kind}"
        for theirs, ours in {"t_embedder": "prefix.time", "self_cond_cfg_embedder": "prefix.guidance"}.items()
        for number, layer in {"0": "expand", "2": "project"}.items()
        for kind in ("weight", "bias")
    },
    "final_layer.norm_final.weight": "norm_final.weight",
    "final_layer.linear.weight": "predict.weight",
    "final_layer.linear.bias": "predict.bias",
    "proj_kernel": "decode_in.weight",
    "proj_bias": "decode_in.bias",
    "unembed_kernel": "decode_out.weight",
    "unembed_bias": "decode_out.bias",
    "t_emb_tokens": "prefix.time_tokens",
    "self_cond_cfg_tokens": "prefix.guidance_tokens",
    "mode_tokens": "prefix.mode_tokens",
}
ELF_BLOCK = {
    "norm1.weight": "norm_attention.weight",
    "attn.qkv.weight": "qkv.weight",
    "attn.qkv.bias": "qkv.bias",
    "attn.q_norm.weight": "norm_q.weight",
    "attn.k_norm.weight": "norm_k.weight",
    "attn.proj.weight": "out.weight",
    "attn.proj.bias": "out.bias",
    "norm2.weight": "norm_mlp.weight",
    "mlp.w12.weight": "mlp_up.weight",
    "mlp.w12.bias": "mlp_up.bias",
    "mlp.w3.weight": "mlp_down.weight",
    "mlp.w3.bias": "mlp_down.bias",
}
ELF_BARE = {"proj_kernel", "unembed_kernel"}
"""Stored (in, out) in both layouts; the other matrices only in JAX's."""


def elf_model(found: Found, which: str, length: int | None, encoder: str | None) -> PublishedElf:
    """The model of a checkpoint of ELF's torch or JAX branch; every size follows from the tensors."""
    if found.layout not in ("ELF file", "Orbax folder"):
        raise UserError(f"{found.place} is a {found.layout}, not a checkpoint of ELF")
    sample = found.raw if found.raw is not None else found.weights("ema")
    jax = found.layout == "Orbax folder"
    named: Callable[[str], str] = _jax_name if jax else str
    depth = depth_of(sample, r"blocks[._](\d+)\.")
    names = {**ELF_OUTSIDE}
    names |= {f"blocks.{i}.{theirs}": f"blocks.{i}.{ours}" for i in range(depth) for theirs, ours in ELF_BLOCK.items()}
    renaming = Renaming(
        {named(theirs): f"network.{ours}" for theirs, ours in names.items()},
        {
            named(theirs): TRANSPOSED
            for theirs in names
            if theirs in ELF_BARE or (jax and named(theirs).endswith(".kernel"))
        },
    )
    out, into = (0, 1) if not jax else (1, 0)

    def size(what: str, *places: tuple[str, int]) -> int:
        return agreed(extents(sample, [(named(name), dim) for name, dim in places]), what, found.place)

    def blocks(name: str, dim: int) -> list[tuple[str, int]]:
        return [(f"blocks.{i}.{name}", dim) for i in range(depth)]

    width = size("width", *blocks("norm1.weight", 0), *blocks("norm2.weight", 0), ("final_layer.norm_final.weight", 0))
    head = size("head width", *blocks("attn.q_norm.weight", 0), *blocks("attn.k_norm.weight", 0))
    config = PublishedElfConfig(
        vocabulary=size("vocabulary", ("unembed_bias", 0), ("unembed_kernel", 1)),
        width=width,
        depth=max(1, depth),
        heads=max(1, width // max(1, head)),
        length=length or DEFAULT_LENGTH,
        dropout=0.0,
        latent=size("latent width", ("proj_bias", 0), ("final_layer.linear.bias", 0), ("self_cond_proj.bias", 0)),
        bottleneck=size("bottleneck", ("text_proj.proj1.weight", out), ("text_proj.proj2.weight", into)),
        inner=size("inner width", *blocks("mlp.w3.weight", into)),
        prefix=size("prefix", *((name, 1) for name in ("t_emb_tokens", "self_cond_cfg_tokens", "mode_tokens"))),
        encoder_name=encoder or PublishedElfConfig.encoder_name,
    )
    check_sizes(config, sample, found.place)
    model = PublishedElf(config)
    fill(model, renaming, found, which)
    return model


def _jax_name(name: str) -> str:
    """The torch branch's name in JAX's tree: blocks_0, and `kernel` for the weight of a linear map."""
    name = name.replace("blocks.", "blocks_")
    parts = name.split(".")
    is_norm = len(parts) > 1 and "norm" in parts[-2]
    return ".".join([*parts[:-1], "kernel"]) if parts[-1] == "weight" and not is_norm else name
