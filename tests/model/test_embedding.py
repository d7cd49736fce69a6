"""The token table: equal norms, gradients tangent to the sphere, health in numbers."""

from __future__ import annotations

import math

import pytest
import torch

from convergeflow.evaluation.health import health
from convergeflow.model.embedding import TokenTable, normalise_rows


def test_rows_have_norm_sqrt_width_whatever_the_parameter() -> None:
    table = TokenTable(11, 8)
    with torch.no_grad():
        table.weight.mul_(torch.logspace(-3, 3, 11)[:, None])
    torch.testing.assert_close(table.rows().norm(dim=-1), torch.full((11,), math.sqrt(8)))
    tokens = torch.tensor([[1, 5], [0, 10]])
    torch.testing.assert_close(table(tokens), table.rows()[tokens])


def test_a_settled_table_is_used_without_a_copy_until_it_changes() -> None:
    table = TokenTable(11, 8)
    expected = table.rows().detach().clone()
    table.weight.requires_grad_(False)
    assert table.rows().data_ptr() != table.weight.data_ptr()
    table.settle()
    torch.testing.assert_close(table.rows(), expected, rtol=0, atol=0)
    assert table.rows().data_ptr() == table.weight.data_ptr()
    before = table.weight.clone()
    table.settle()
    assert torch.equal(table.weight, before)
    with torch.no_grad():
        table.weight.mul_(3.0)
    assert table.rows().data_ptr() != table.weight.data_ptr()
    torch.testing.assert_close(table.rows(), expected)


def test_a_learning_table_keeps_its_gradient_even_when_normal() -> None:
    table = TokenTable(11, 8)
    table.settle()
    assert table.rows().requires_grad
    with torch.no_grad():
        assert table.rows().data_ptr() == table.weight.data_ptr()


def test_gradient_has_no_radial_part() -> None:
    raw = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    (normalise_rows(raw) * torch.randn(5, 6, dtype=torch.float64)).sum().backward()
    assert raw.grad is not None
    torch.testing.assert_close(
        (raw.grad * raw.detach()).sum(-1), torch.zeros(5, dtype=torch.float64), atol=1e-12, rtol=0
    )


def test_health_of_orthogonal_and_collapsed_tables() -> None:
    orthogonal = health(torch.eye(8) * math.sqrt(8))
    assert orthogonal.effective_rank == pytest.approx(8)
    assert orthogonal.nearest_distance == pytest.approx(math.sqrt(2))
    assert orthogonal.largest_cosine == pytest.approx(0)
    assert not orthogonal.collapsed
    collapsed = health(normalise_rows(torch.ones(8, 8) + 1e-4 * torch.randn(8, 8)))
    assert collapsed.collapsed and collapsed.nearest_distance < 1e-2


def test_health_is_the_same_for_any_tile() -> None:
    table = normalise_rows(torch.randn(50, 6))
    small, large = (vars(health(table, tile=tile)) for tile in (7, 64))
    assert small == pytest.approx(large, rel=1e-12)
