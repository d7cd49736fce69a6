"""From a configuration to a corpus and a fresh model; one entry per method, so that rivals slot in.

A builder gets the configuration and the vocabulary and returns a `LanguageModel`. What the model knows of its corpus
before training (unigram counts) is set by `introduce`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convergeflow.data.corpus import Corpus
from convergeflow.data.prepare import prepare
from convergeflow.errors import UserError, unknown_name
from convergeflow.randomness import derive_seed
from convergeflow.systems import METHODS
from convergeflow.training.checkpoint import read_tensors
from convergeflow.training.config import RunConfig


def open_corpus(config: RunConfig, progress: Callable[[str, int, int | None], None] | None = None) -> Corpus:
    """The prepared corpus of a configuration; it is prepared now if it was not before."""
    wanted = config.corpus
    sizes: dict[str, Any] = {"blocks": wanted.blocks, "heldout_blocks": wanted.heldout_blocks}
    return prepare(
        list(wanted.paths) or wanted.name,
        tokenizer=wanted.tokenizer,
        vocabulary=wanted.vocabulary,
        length=wanted.length,
        progress=progress,
        **{name: value for name, value in sizes.items() if value is not None},
    )


def _flow(config: RunConfig, vocabulary: int) -> nn.Module:
    from convergeflow.systems.convergeflow import ConvergeFlowModel

    wanted = config.model
    kind = METHODS.get(wanted.method, ConvergeFlowModel)
    if wanted.options:
        raise UserError(f"model.options.{min(wanted.options)}: method {wanted.method!r} has no options of its own")
    schedule: dict[str, Any] = {"kind": wanted.schedule.kind}
    if wanted.schedule.kind == "gumbel":
        schedule |= {"loc": wanted.start_loc(), "scale": wanted.schedule.scale, "cutoff": wanted.schedule.cutoff}
    described = kind.config_class(
        vocabulary=vocabulary,
        width=wanted.width,
        depth=wanted.depth,
        heads=wanted.heads,
        condition_width=wanted.condition_width,
        length=config.corpus.length,
        dropout=wanted.dropout,
        predictor=wanted.predictor,
        schedule=schedule,
        gate_init=wanted.gate_init,
        context_free_input=wanted.context_free_input,
        neighbours=wanted.neighbours,
        head_init=wanted.head_init,
        pool_evidence=wanted.pool_evidence,
        block_length=wanted.block_length,
        method=wanted.method,
    )
    model = kind(described)
    model.network.backbone.recompute = config.recompute
    return model


def _rival(config: RunConfig, vocabulary: int) -> nn.Module:
    kind = METHODS[config.model.method]
    model = kind(kind.config_class.from_run(config.model, vocabulary=vocabulary, length=config.corpus.length))
    backbone = getattr(model.network, "backbone", None)  # the autoregressive one has blocks of its own
    if backbone is not None:
        backbone.recompute = config.recompute
    return model


BUILDERS: dict[str, Callable[[RunConfig, int], nn.Module]] = {
    "convergeflow": _flow,
    **dict.fromkeys(METHODS, _rival),
    "langflow": _flow,  # the same network under its own objective and sampler
}
"""Method name -> builder."""


def build_model(config: RunConfig, vocabulary: int) -> nn.Module:
    """A fresh model; its weights are a function of the seed alone."""
    if config.model.method not in BUILDERS:
        raise unknown_name("method", config.model.method, BUILDERS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, "init"))
        return BUILDERS[config.model.method](config, vocabulary)


def introduce(model: nn.Module, corpus: Corpus, config: RunConfig) -> None:
    """Tell a model the unigram counts of its corpus; an entropy given in the configuration wins over theirs."""
    set_unigram = getattr(model, "set_unigram", None)
    if set_unigram is None:
        return
    set_unigram(torch.from_numpy(corpus.unigram * corpus.train.size))
    learned = getattr(model, "learned_schedule", None)
    if learned is not None and config.model.schedule.entropy is not None:
        with torch.no_grad():
            learned.entropy.fill_(config.model.schedule.entropy)


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path) -> None:
    """Start from the parameters of another checkpoint; buffers describe the corpus and stay this one's."""
    path = folder / "model.safetensors"
    if not path.is_file():
        raise UserError(f"--init-from {folder}: there is no model.safetensors (give a checkpoint folder)")
    try:
        weights = read_tensors(path)
    except Exception as error:
        raise UserError(f"--init-from {folder}: {path.name} is not readable ({error})") from None
    own = dict(model.named_parameters())
    buffers = {name for name, _ in model.named_buffers()}
    missing, extra = own.keys() - weights.keys(), weights.keys() - own.keys() - buffers
    if missing or extra:
        what = f"lacks {min(missing)!r}" if missing else f"holds {min(extra)!r}, unknown here"
        raise UserError(f"--init-from {folder} does not fit this configuration: it {what}")
    for name, parameter in own.items():
        if parameter.shape != weights[name].shape:
            raise UserError(
                f"--init-from {folder} does not fit this configuration: {name} is {list(weights[name].shape)} there "
                f"and {list(parameter.shape)} here (see model.size, model.width and corpus.vocabulary)"
            )
        parameter.copy_(weights[name])
