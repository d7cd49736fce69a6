from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from toy import ToyModel

from convergeflow.errors import ConvergeFlowError
from convergeflow.training.config import OptimizerConfig, StageConfig
from convergeflow.training.optimizer import Muon, StageOptimizer, groups_of, kind_of, orthogonalise


def stage(**changes: Any) -> StageConfig:
    values = {"name": "s", "objective": "ce", "steps": 10, "lr": 1e-3, "learn_table": True, "learn_schedule": True}
    return StageConfig(**{**values, **changes})


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("network.embedding.weight", (9, 4), "table"),
        ("embedding.weight", (9, 4), "table"),
        ("learned_schedule.loc", (1,), "schedule"),
        ("network.backbone.blocks.0.attention.qkv.weight", (12, 4), "matrix"),
        ("network.backbone.blocks.0.modulation.weight", (24, 8), "other"),
        ("network.backbone.blocks.0.mlp_up.bias", (16,), "other"),
        ("network.backbone.modulation_final.weight", (8, 8), "other"),
        ("network.head.weight", (9, 4), "other"),
        ("network.condition_input.weight", (4, 8), "other"),
    ],
)
def test_kinds(name: str, shape: tuple[int, ...], kind: str) -> None:
    assert kind_of(name, torch.zeros(shape)) == kind


def test_groups_cover_every_trained_parameter_once() -> None:
    model = ToyModel()
    adamw, muon = groups_of(model.named_parameters(), stage(), OptimizerConfig(name="muon-fp32", weight_decay=0.1))
    names = [name for group in [*adamw, *muon] for name in group["names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert [name for group in muon for name in group["names"]] == ["blocks.0.0.weight", "blocks.1.0.weight"]
    assert muon[0]["peak"] == pytest.approx(20 * 1e-3) and muon[0]["weight_decay"] == 0.1
    decay = {name: group["weight_decay"] for group in adamw for name in group["names"]}
    assert decay["head.weight"] == 0.1
    assert decay["embedding.weight"] == decay["head.bias"] == decay["schedule.loc"] == 0.0


def test_rates_by_kind_and_share() -> None:
    optimizer = StageOptimizer(
        ToyModel().named_parameters(), stage(schedule_lr=0.5, matrix_lr=0.02), OptimizerConfig(name="muon-fp32")
    )
    assert optimizer.set_rate(0.5) == 0.5e-3
    rates = {group["kind"]: group["lr"] for part in optimizer.parts for group in part.param_groups}
    assert rates == {"table": 0.5e-3, "other": 0.5e-3, "schedule": 0.25, "matrix": 0.01}


def test_frozen_parameters_are_left_out_and_all_frozen_is_an_error() -> None:
    model = ToyModel()
    model.embedding.weight.requires_grad_(False)
    adamw, _ = groups_of(model.named_parameters(), stage(), OptimizerConfig())
    assert "embedding.weight" not in [name for group in adamw for name in group["names"]]
    with pytest.raises(ConvergeFlowError, match="trains nothing"):
        StageOptimizer(model.requires_grad_(False).named_parameters(), stage(), OptimizerConfig())


@pytest.mark.parametrize("shape", [(16, 16), (48, 16), (16, 64)])
def test_orthogonalise_keeps_directions_and_levels_singular_values(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonalise(matrix)
    assert result.dtype == torch.float32
    # In the singular basis of the input the result is diagonal, with entries near one.
    diagonal = u.T @ result @ v.T
    off = diagonal - torch.diag(diagonal.diag())
    assert off.abs().max() < 1e-4
    large = s > 0.05 * s.max()
    assert diagonal.diag()[large].min() > 0.6 and diagonal.diag().max() < 1.3


def test_muon_step_has_the_stated_size() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(32, 8))
    muon = Muon([{"params": [parameter], "names": ["w"], "lr": 0.1}], momentum=0.95)
    parameter.grad = torch.randn(32, 8) * 1e-6  # the size of a gradient does not matter
    muon.step()
    singular = torch.linalg.svdvals(parameter.detach())
    assert singular.max() < 0.1 * math.sqrt(4) * 1.3 and singular.min() > 0.1 * math.sqrt(4) * 0.5


@pytest.mark.parametrize("name", ["adamw", "muon-fp32"])
def test_state_survives_a_round_trip_bit_for_bit(name: str) -> None:
    config = OptimizerConfig(name=name, weight_decay=0.1)  # type: ignore[arg-type]

    def push(model: nn.Module, optimizer: StageOptimizer, seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    first = ToyModel()
    a = StageOptimizer(first.named_parameters(), stage(), config)
    push(first, a, 0)
    second = ToyModel()
    second.load_state_dict(first.state_dict())
    b = StageOptimizer(second.named_parameters(), stage(), config)
    b.load(a.state())
    push(first, a, 1)
    push(second, b, 1)
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)
    with pytest.raises(ConvergeFlowError, match=r"no optimizer state for"):
        b.load({})
