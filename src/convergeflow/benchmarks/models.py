"""The models that are measured: random weights, none of them zero, in two sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from convergeflow.benchmarks.plain import PlainModel
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel


@dataclass(frozen=True)
class Size:
    """A network and the batches it is measured on."""

    width: int
    depth: int
    heads: int
    vocabulary: int
    length: int
    sample_batch: int
    train_batch: int
    self_condition: float


SIZES = {
    "small": Size(256, 6, 4, 8192, 128, sample_batch=16, train_batch=32, self_condition=0.25),
    # One row is either self-conditioned or not: off, so that every step is the same work.
    "paper": Size(768, 12, 12, 50257, 1024, sample_batch=1, train_batch=1, self_condition=0.0),
}


def build(size: Size) -> ConvergeFlowModel:
    """A model with weights like a trained one's in scale: fresh ones are zero where it matters."""
    config = ConvergeFlowConfig(
        vocabulary=size.vocabulary,
        width=size.width,
        depth=size.depth,
        heads=size.heads,
        length=size.length,
        schedule={"kind": "gumbel", "loc": 4.9563, "scale": 0.9637, "cutoff": 1e-5},
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)  # contestants are built apart and must start alike
        model = ConvergeFlowModel(config)
        for parameter in model.network.parameters():
            if not bool(parameter.any()):
                parameter.normal_(std=0.02)
        model.network.embedding.settle()  # as in every model after its first stage
    return model


def plain_twin(model: ConvergeFlowModel, kind: type[PlainModel] = PlainModel, *, copy: bool = False) -> PlainModel:
    """The plain model on the same weights, or on a copy of them that can be trained."""
    weights = {name: value.detach() for name, value in model.network.state_dict().items()}
    if copy:
        weights = {
            name: value.clone().requires_grad_(name not in ("embedding.weight", "log_unigram"))
            for name, value in weights.items()
        }
    return kind(weights, model.config.heads, model.config.dropout)
