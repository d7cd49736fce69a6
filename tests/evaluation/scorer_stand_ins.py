"""Small scorers whose answers are known: a table of next-token probabilities, and a random GPT-2 in a folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tiny_model import word_shares
from torch import Tensor, nn

from convergeflow.data.stories import stories_law
from convergeflow.data.tokenizer import byte_tokenizer, stories_tokenizer
from convergeflow.evaluation.scorers import CausalScorer


class TableModel(nn.Module):
    """A causal "model" that knows the last token only: p(next | last) is a row of a table."""

    def __init__(self, probabilities: np.ndarray[Any, Any]) -> None:
        super().__init__()
        self.register_buffer("logits", torch.tensor(np.log(probabilities)))
        self.config = SimpleNamespace(vocab_size=len(probabilities), max_position_embeddings=4096)
        self.device = torch.device("cpu")

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        return SimpleNamespace(logits=self.logits[input_ids])


class WordTokenizer:
    """Words of a given list, separated by spaces."""

    def __init__(self, words: list[str]) -> None:
        self.words = {word: index for index, word in enumerate(words)}

    def __call__(self, texts: list[str], add_special_tokens: bool, verbose: bool) -> dict[str, Any]:
        return {"input_ids": [[self.words[word] for word in text.split()] for text in texts]}


class StoryTokenizer:
    """The tokenizer of the stories in the shape of transformers."""

    def __init__(self) -> None:
        self.tokenizer = stories_tokenizer()

    def __call__(self, texts: list[str], add_special_tokens: bool, verbose: bool) -> dict[str, Any]:
        return {"input_ids": [self.tokenizer.encode(text) for text in texts]}


def bigram_scorer() -> CausalScorer:
    """Next-word frequencies of stories mixed with word frequencies: knows sentences a little, so it can order texts."""
    law = stories_law()
    size = len(law.vocabulary)
    counts = np.full((size, size), 1e-6)
    blocks = law.sample(np.random.default_rng(99), 400, 64)
    np.add.at(counts, (blocks[:, :-1].ravel(), blocks[:, 1:].ravel()), 1.0)
    model = TableModel(0.7 * counts / counts.sum(1, keepdims=True) + 0.25 * word_shares() + 0.05 / size)
    return CausalScorer("bigram", model, StoryTokenizer(), start_id=0, end_id=0, weights="counts")


def random_gpt2(folder: Path) -> Path:
    """A random two-layer GPT-2 over bytes, as a checkpoint folder."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=tokenizer.size, n_positions=48, n_embd=16, n_layer=2, n_head=2, initializer_range=0.4
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder
