"""A model that knows the words of the stories and nothing of their order: its samples are words at random."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from convergeflow.data.stories import stories_law
from convergeflow.data.tokenizer import stories_tokenizer
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel


def word_shares() -> NDArray[np.float64]:
    """How often each word occurs in long texts."""
    law = stories_law()
    ids = law.sample(np.random.default_rng(3), 200, 2000)
    return np.bincount(ids.ravel(), minlength=len(law.vocabulary)) / ids.size


def word_model(length: int = 16, width: int = 32) -> ConvergeFlowModel:
    """A fresh network with the words' frequencies in the bias of its head: the exact posterior of independent words."""
    law = stories_law()
    torch.manual_seed(0)
    model = ConvergeFlowModel(
        ConvergeFlowConfig(
            vocabulary=len(law.vocabulary), width=width, depth=1, heads=1, condition_width=8, length=length, dropout=0.0
        )
    )
    with torch.no_grad():
        model.network.head.bias.copy_(torch.tensor(word_shares()).log())
    model.tokenizer = stories_tokenizer()
    return model.eval()


def saved_word_model(folder: Path) -> Path:
    """The same as a checkpoint folder."""
    word_model().save_pretrained(folder)
    return folder
