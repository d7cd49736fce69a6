"""Checkpoints of the MDLM family (MDLM, Duo, SEDD, AR, FLM, FMLM): one network under one set of names.

The tensors of MDLM, Duo, SEDD and FLM have the same names and shapes, so only the settings in a file can tell them
apart. Where a file has settings they must agree with what was asked for; where it has none, the user's word counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.interop.langflow import BLOCK, OUTSIDE_BLOCKS
from convergeflow.interop.layouts import DEFAULT_LENGTH, Found
from convergeflow.interop.renaming import Renaming, agreed, depth_of, extents, fill
from convergeflow.systems.duo import DuoConfig
from convergeflow.systems.protocol import LanguageModel, check_sizes
from convergeflow.systems.published.autoregressive import PublishedAr, PublishedArConfig
from convergeflow.systems.published.discrete import (
    PublishedDuo,
    PublishedMdlm,
    PublishedMdlmConfig,
    PublishedSeddAbsorb,
    PublishedSeddAbsorbConfig,
    PublishedSeddUniform,
)
from convergeflow.systems.published.flm import PublishedFlm, PublishedFmlm, PublishedFmlmConfig
from convergeflow.systems.rival import RivalConfig
from convergeflow.systems.sedd import SeddUniformConfig

FAMILY = ("mdlm", "duo", "sedd", "ar", "flm", "fmlm")
LOG_LINEAR = ("loglinear", "log-linear")
NEVER_HERE = ("self_cond_proj",)
"""Of LangFlow's network, which has one input more."""


def family_model(
    found: Found, peer: str, which: str, length: int | None, teacher: Found | None
) -> tuple[LanguageModel, list[str]]:
    """The model of a checkpoint, and remarks about it."""
    if found.layout not in ("hub folder", "Lightning file", "SEDD run"):
        raise UserError(f"{found.place} is a {found.layout}, not a checkpoint of {peer}")
    if found.layout == "SEDD run" and not found.config:
        raise UserError(f"{found.place} does not say which graph it is of: .hydra/config.yaml of its run is needed")
    says = Says.of(found)
    says.agree(peer, found.place)
    sample = found.raw if found.raw is not None else found.weights("ema")
    prefix = "backbone." if any(name.startswith("backbone.") for name in sample) else ""
    sizes = _sizes(sample, prefix, says, found.place)
    sizes["length"] = length or says.length or DEFAULT_LENGTH
    check_sizes(RivalConfig(**sizes), sample, found.place)
    remarks = [] if says.kind else ["the file does not say which method it was trained with; your word is taken"]
    if not (length or says.length):
        remarks.append(f"the file does not say its length: {DEFAULT_LENGTH} is assumed, unless `length` says otherwise")
    model, more = _made(peer, says, sizes, teacher is not None)
    student = "network.student." if peer == "fmlm" else "network."
    fill(model, _renaming(sample, prefix, sizes["depth"], peer, student), found, which)
    if teacher is not None:
        Says.of(teacher).agree("flm", teacher.place)
        fill_teacher(model, teacher, sizes["depth"])
    return model, [*remarks, *more]


def fill_teacher(model: LanguageModel, teacher: Found, depth: int) -> None:
    """The teacher's averaged weights: those that the flow map was distilled from."""
    sample = teacher.raw if teacher.raw is not None else teacher.weights("ema")
    prefix = "backbone." if any(name.startswith("backbone.") for name in sample) else ""
    fill(model, _renaming(sample, prefix, depth, "flm", "network.teacher."), teacher, "ema")


def _made(peer: str, says: Says, sizes: dict[str, int], with_teacher: bool) -> tuple[LanguageModel, list[str]]:
    """The model of a method, with fresh weights; the mask is not one of its `vocabulary`."""
    shape: dict[str, Any] = {**sizes, "dropout": says.dropout}
    masked: dict[str, Any] = {**shape, "vocabulary": sizes["vocabulary"] - 1}
    if peer == "mdlm":
        return PublishedMdlm(PublishedMdlmConfig(**masked, time_conditioning=says.time_conditioning)), []
    if peer == "ar":
        return PublishedAr(PublishedArConfig(**masked)), []
    if peer == "duo":
        return PublishedDuo(DuoConfig(**shape)), []
    if peer == "flm":
        return PublishedFlm(RivalConfig(**shape)), []
    if peer == "fmlm":
        stage = says.stage or ("residual" if with_teacher else "map")
        if (stage == "residual") is not with_teacher:
            fix = (
                "first stage: give its FLM as `teacher`" if stage == "residual" else "second stage: it has no `teacher`"
            )
            raise UserError(f"the file says that it is of the {fix}")
        remark = "the file does not say its stage; without `teacher` it is taken as the second, which stands alone"
        return PublishedFmlm(PublishedFmlmConfig(**shape, stage=stage)), [] if says.stage or with_teacher else [remark]
    if says.graph == "uniform":
        return PublishedSeddUniform(SeddUniformConfig(**shape, **says.noise_range)), []
    return PublishedSeddAbsorb(PublishedSeddAbsorbConfig(**masked, scale_by_sigma=says.scale_by_sigma)), []


# -- names -------------------------------------------------------------------------------------------------------------


def _renaming(sample: Mapping[str, Tensor], prefix: str, depth: int, peer: str, network: str) -> Renaming:
    outside = {name.removeprefix("backbone."): ours for name, ours in OUTSIDE_BLOCKS.items()}
    outside = {name: ours for name, ours in outside.items() if not name.startswith(NEVER_HERE)}
    inside: dict[str, str] = {}
    for i in range(depth):
        inside |= {f"blocks.{i}.{theirs}": f"backbone.blocks.{i}.{ours}" for theirs, ours in BLOCK.items()}
    if peer == "ar":  # the same network without time, hence without modulation
        timeless = {theirs: ours for theirs, ours in {**outside, **inside}.items() if not _of_time(theirs)}
        names = {theirs: _causal(ours) for theirs, ours in timeless.items()}
    else:
        names = {**outside, **inside}
    names = {theirs: network + ours for theirs, ours in names.items()}
    if peer == "fmlm":
        level = f"{network}backbone.noise_level"
        names = {theirs: ours.replace(level, f"{level}.now") for theirs, ours in names.items()}
        names |= _two_layers("sigma_map_prime", f"{level}.then")
        names |= _two_layers("learnable_loss_weighting.s_embed", "network.loss_weight.time")
        names |= _two_layers("learnable_loss_weighting", "network.loss_weight")
    return Renaming({prefix + theirs: ours for theirs, ours in names.items()}, rotary=f"{prefix}rotary_emb.inv_freq")


def _two_layers(theirs: str, ours: str) -> dict[str, str]:
    layers = {"0": "expand", "2": "project"}
    return {
        f"{theirs}.mlp.{number}.{kind}": f"{ours}.{layer}.{kind}"
        for number, layer in layers.items()
        for kind in ("weight", "bias")
    }


def _of_time(name: str) -> bool:
    return name.startswith("sigma_map.") or "adaLN_modulation" in name


def _causal(name: str) -> str:
    """The names of our causal network: no trunk of its own, attention inside the block."""
    return name.removeprefix("backbone.").replace(".attention.", ".")


def _sizes(sample: Mapping[str, Tensor], prefix: str, says: Says, source: str) -> dict[str, int]:
    """From the settings where there are any, else what most tensors agree on."""
    depth = says.depth or depth_of(sample, re.escape(prefix) + r"blocks\.(\d+)\.")
    norms = [(f"{prefix}blocks.{i}.norm{n}.weight", 0) for i in range(depth) for n in (1, 2)]
    norms.append((f"{prefix}output_layer.norm_final.weight", 0))
    width = says.width or agreed(extents(sample, norms), "width", source)
    tokens = [("output_layer.linear.bias", 0), ("output_layer.linear.weight", 0), ("vocab_embed.embedding", 0)]
    vocabulary = says.vocabulary or agreed(
        extents(sample, [(prefix + name, dim) for name, dim in tokens]), "vocabulary", source
    )
    times = [("sigma_map.mlp.0.bias", 0), ("sigma_map.mlp.2.bias", 0), ("sigma_map.mlp.0.weight", 0)]
    found = extents(sample, [(prefix + name, dim) for name, dim in times])
    rotary = f"{prefix}rotary_emb.inv_freq"
    half = agreed(extents(sample, [(rotary, 0)]) or [0], "heads", source)
    if not half:
        raise UserError(f"{source} is not this network: missing: {rotary}")
    heads = says.heads or width // (2 * half)
    if heads < 1 or width != 2 * half * heads:
        raise UserError(
            f"{source} is not this network: mis-shaped: {rotary} is ({half},), which does not go with width {width}"
            + (f" and {says.heads} heads" if says.heads else "")
        )
    condition = says.condition_width or (agreed(found, "condition width", source) if found else 128)
    return {
        "vocabulary": vocabulary,
        "width": width,
        "depth": max(1, depth),
        "heads": heads,
        "condition_width": condition,
    }


# -- what a file says about itself -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Says:
    """The settings in a file, under our words; None and 0 where it has none."""

    kind: str | None = None
    length: int | None = None
    vocabulary: int = 0
    width: int = 0
    depth: int = 0
    heads: int = 0
    condition_width: int = 0
    dropout: float = 0.1
    time_conditioning: bool = False
    scale_by_sigma: bool = True
    graph: str = "absorb"
    smallest_noise: float | None = None
    largest_noise: float | None = None
    noise: str | None = None
    causal: bool = False
    tied: bool = False
    stage: str | None = None

    @property
    def noise_range(self) -> dict[str, Any]:
        """Of the geometric noise."""
        ends = {"smallest_noise": self.smallest_noise, "largest_noise": self.largest_noise}
        return {name: value for name, value in ends.items() if value is not None}

    @classmethod
    def of(cls, found: Found) -> Says:
        """Read the settings of a hub folder, of a Lightning file or of a SEDD run."""
        config, place = found.config, found.place
        try:
            if not config:
                return cls()
            if "graph" in config:
                return cls._of_sedd(config)
            if "model" in config and isinstance(config["model"], dict):
                return cls._of_run(config)
            return cls._of_hub(config)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            said = " ".join(repr(error).split())[:200]
            raise UserError(f"the settings in {place} are not those of the family: {said}") from None

    @classmethod
    def _of_hub(cls, config: Mapping[str, Any]) -> Says:
        kind = config.get("model_type") or next(iter(config.get("architectures") or []), None)
        return cls(
            kind=None if kind is None else str(kind).casefold(),
            length=int(config["model_length"]),
            vocabulary=int(config["vocab_size"]),
            width=int(config["hidden_dim"]),
            depth=int(config["n_blocks"]),
            heads=int(config["n_heads"]),
            condition_width=int(config["cond_dim"]),
            dropout=float(config.get("dropout", 0.1)),
            time_conditioning=bool(config.get("time_conditioning", False)),
            causal=bool(config.get("causal", False)),
        )

    @classmethod
    def _sizes(cls, model: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that refer to others (`${...}`) are not resolved: the tensors tell sizes as well."""
        plain = {name: value for name, value in model.items() if "${" not in str(value)}
        return {
            "length": int(plain.get("length", 0)) or None,
            "width": int(plain.get("hidden_size", 0)),
            "depth": int(plain.get("n_blocks", 0)),
            "heads": int(plain.get("n_heads", 0)),
            "condition_width": int(plain.get("cond_dim", 0)),
            "dropout": float(plain.get("dropout", 0.1)),
            "scale_by_sigma": bool(plain.get("scale_by_sigma", True)),
            "tied": bool(plain.get("tie_word_embeddings", False)),
        }

    @classmethod
    def _of_sedd(cls, config: Mapping[str, Any]) -> Says:
        graph, noise = str(config["graph"]["type"]), config["noise"]
        return cls(
            kind="sedd",
            vocabulary=int(config["tokens"]) + (graph == "absorb"),
            graph=graph,
            noise=str(noise["type"]),
            smallest_noise=float(noise["sigma_min"]),
            largest_noise=float(noise["sigma_max"]),
            **cls._sizes(config["model"]),
        )

    @classmethod
    def _of_run(cls, config: Mapping[str, Any]) -> Says:
        """A run of the MDLM repository (`parameterization`), or of the Duo and FLM repositories (`algo`)."""
        algo = config.get("algo")
        settings = algo if isinstance(algo, dict) else config
        if isinstance(algo, dict):
            kind, stage = _kind_of_algorithm(str(algo["name"]))
        else:
            words = {"subs": "mdlm", "sedd": "sedd", "ar": "ar"}
            kind, stage = words.get(str(config["parameterization"]), str(config["parameterization"])), None
        return cls(
            kind=kind,
            stage=stage,
            time_conditioning=bool(settings.get("time_conditioning", False)),
            causal=bool(settings.get("causal_attention", kind == "ar")),
            noise=str(config.get("noise", {}).get("type")),
            **cls._sizes(config["model"]),
        )

    def agree(self, peer: str, place: str) -> None:
        """Refuse what is not the `peer`, or a variant of it that computes another function."""
        if self.kind is not None and self.kind != peer:
            raise UserError(f"{place} says that it is {self.kind}, not {peer}: give `convergeflow import {self.kind}`")
        if self.causal is not (peer == "ar") and self.kind is not None:
            raise UserError(f"{place} has {'causal' if self.causal else 'full'} attention, which {peer} does not")
        if self.tied:
            raise UserError(f"{place} ties its input and output tables; only models with two tables can be imported")
        if peer == "sedd" and (self.graph, self.noise) not in {
            *(("absorb", name) for name in (*LOG_LINEAR, None)),
            ("uniform", "geometric"),
        }:
            raise UserError(
                f"{place} has the graph {self.graph!r} with {self.noise!r} noise; absorb with loglinear and uniform "
                "with geometric noise can be imported"
            )
        if peer in ("mdlm", "duo") and self.noise not in (*LOG_LINEAR, None):
            raise UserError(f"{place} has {self.noise!r} noise; only log-linear noise can be imported")


def _kind_of_algorithm(name: str) -> tuple[str, str | None]:
    """Our word for an algorithm of the Duo and FLM repositories, and a flow map's stage."""
    if name.startswith("flm") and "distill" in name:
        return "fmlm", "map" if "double" in name else "residual"
    return {"duo_base": "duo", "distillation": "duo"}.get(name, name), None
