"""From a configuration to a corpus and a fresh model, which may start from another checkpoint's weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from convergeflow.data.contexts import mixed
from convergeflow.data.corpus import Corpus
from convergeflow.data.prepare import prepare
from convergeflow.errors import UserError
from convergeflow.model.backbone import Backbone
from convergeflow.randomness import derive_seed
from convergeflow.systems import METHODS
from convergeflow.systems.protocol import WEIGHTS_FILE, LanguageModel, misfits, read_tensors
from convergeflow.training.config import RunConfig


def open_corpus(
    config: RunConfig, progress: Callable[[str, int, int | None], None] | None = None, *, large: bool = True
) -> Corpus:
    """The prepared corpus of a configuration; it is prepared now if it was not before, `large` ones only if allowed."""
    how = config.corpus.model_dump(exclude={"name", "paths", "windows"}, exclude_none=True)
    return prepare(list(config.corpus.paths) or config.corpus.name, progress=progress, large=large, **how)


def build_model(config: RunConfig, vocabulary: int) -> LanguageModel:
    """A fresh model; its weights are a function of the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, "init"))
        model = METHODS[config.model.method](config.model.complete(vocabulary, config.corpus.length))
    for module in model.modules():
        if isinstance(module, Backbone):
            module.recompute = config.recompute
    return model


def introduce(model: LanguageModel, corpus: Corpus, config: RunConfig) -> None:
    """Tell a model what is counted in its corpus; an entropy given in the configuration wins over the counts' own."""
    model.set_unigram(torch.from_numpy(corpus.unigram * corpus.train.size), config.model.entropy)
    if config.table == "contexts":
        start_table(model, corpus)


@torch.no_grad()
def start_table(model: LanguageModel, corpus: Corpus) -> None:
    """Turn the rows of a fresh table towards tokens that stand in the same places, and the head that starts there."""
    if model.table is None:
        raise UserError("table=contexts is for methods with a token table; leave it out")
    rows = model.table.get_parameter("weight")[: corpus.vocabulary]  # some methods have one more, for a mask
    rows.copy_(torch.from_numpy(mixed(rows.cpu().numpy(), np.asarray(corpus.train))))
    if ratio := getattr(model.config, "head_init", 0.0):
        head = model.network.get_submodule("head").get_parameter("weight")
        head.copy_(ratio * model.network.get_submodule("embedding").rows())  # type: ignore[operator]


@torch.no_grad()
def load_weights(model: LanguageModel, folder: Path) -> None:
    """Start from the parameters of another checkpoint; buffers describe the corpus and stay this one's."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise UserError(f"`init_from` {folder}: there is no {WEIGHTS_FILE} (give a checkpoint folder)")
    weights = read_tensors(path)
    own, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    if wrong := misfits(own, {name: value for name, value in weights.items() if name not in buffers}):
        raise UserError(
            f"`init_from` {folder} does not fit this configuration: {wrong} (see model.size, model.width and "
            "corpus.vocabulary)"
        )
    for name, parameter in own.items():
        parameter.copy_(weights[name])
