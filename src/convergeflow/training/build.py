"""From a configuration to a corpus and a fresh model, which may start from another checkpoint's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from convergeflow.data.contexts import mixed
from convergeflow.data.corpus import Corpus
from convergeflow.data.prepare import prepare
from convergeflow.data.tokenizer import Tokenizer
from convergeflow.errors import UserError
from convergeflow.model.backbone import Backbone
from convergeflow.randomness import derive_seed
from convergeflow.systems import METHODS
from convergeflow.systems.protocol import WEIGHTS_FILE, LanguageModel, misfits, read_tensors
from convergeflow.systems.rival import AlongTable
from convergeflow.training.config import RunConfig

AVERAGE_FILE = "ema.safetensors"
"""In a checkpoint of a run: the averaged weights."""
SPACE = "\u0120"
"""How byte-level vocabularies write the space before a word."""


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
    """Tell a fresh model what is counted in its corpus."""
    tell_frequencies(model, corpus, config)
    if config.table == "contexts":
        start_table(model, corpus)


def tell_frequencies(model: LanguageModel, corpus: Corpus, config: RunConfig) -> None:
    """The counts of the tokens; an entropy given in the configuration wins over the counts' own."""
    model.set_unigram(torch.from_numpy(corpus.unigram * corpus.train.size), config.model.entropy)


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
    elif isinstance(model.network, AlongTable):
        model.network.start_head(model.config.head_start)


@torch.no_grad()
def load_weights(model: LanguageModel, folder: Path, tokenizer: Tokenizer | None = None) -> int | None:
    """Start from the parameters of another checkpoint; buffers describe the corpus and stay this one's.

    If `tokenizer`, the model's, is not the checkpoint's, the trunk is taken over, and of everything that has a row per
    token those rows whose token the checkpoint knows. Returns how many tokens are new to it; None if the tokenizer is
    the same.
    """
    path = folder / (AVERAGE_FILE if (folder / AVERAGE_FILE).is_file() else WEIGHTS_FILE)
    if not path.is_file():
        raise UserError(f"`init_from` {folder}: there is no {WEIGHTS_FILE} (give a checkpoint folder)")
    weights = read_tensors(path)
    own, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    new = None
    if tokenizer is not None and (folder / "tokenizer.json").is_file():
        before = Tokenizer.load(folder)
        if before.tokens() != tokenizer.tokens():
            rows = known_rows(tokenizer.tokens(), before.tokens())
            new = len(rows) - sum(row is not None for row in rows)
            for name in _rows_of_tokens(model) & weights.keys():
                weights[name] = _with_rows(own[name], weights[name], rows, before.size)
    if wrong := misfits(own, {name: value for name, value in weights.items() if name not in buffers}):
        raise UserError(
            f"`init_from` {folder} does not fit this configuration: {wrong} (see model.size, model.width and "
            "corpus.vocabulary)"
        )
    for name, parameter in own.items():
        parameter.copy_(weights[name])
    return new


def known_rows(tokens: Sequence[str], before: Sequence[str]) -> list[int | None]:
    """For every token the row that it had in another vocabulary, or None; no row is taken twice.

    A word with the space before it (byte-level tokenizers write that as one sign) is also the word without it: word
    tokenizers have no spaces.
    """
    free = {token: row for row, token in enumerate(before)}
    rows = [free.pop(token, None) for token in tokens]
    for index, token in enumerate(tokens):
        if rows[index] is None:
            plain = token.removeprefix(SPACE)
            rows[index] = free.pop(plain if plain != token else SPACE + token, None)
    return rows


def _rows_of_tokens(model: LanguageModel) -> set[str]:
    """The parameters that have a row per token: those that grow with the vocabulary."""
    with torch.device("meta"):
        larger = dict(type(model)(replace(model.config, vocabulary=model.config.vocabulary + 1)).named_parameters())
    return {name for name, parameter in model.named_parameters() if parameter.shape != larger[name].shape}


def _with_rows(fresh: Tensor, old: Tensor, rows: Sequence[int | None], before: int) -> Tensor:
    """`fresh` with the old rows of known tokens; rows behind the vocabulary (a mask) are taken over in their order."""
    if fresh.shape[1:] != old.shape[1:] or len(fresh) - len(rows) != len(old) - before:
        return old  # another size altogether: refused by name
    kept = [(new, row) for new, row in enumerate(rows) if row is not None]
    kept += zip(range(len(rows), len(fresh)), range(before, len(old)), strict=True)
    whole = fresh.detach().clone()
    whole[[new for new, _ in kept]] = old[[row for _, row in kept]].to(whole)
    return whole
