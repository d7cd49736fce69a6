"""The fused head against dense autograd, finite differences, the Gaussian posterior and brute force."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from convergeflow.model import fused as fused_module
from convergeflow.model.fused import exact_products, kernel_scores, nearest, weigh
from convergeflow.model.head import logits

NAMES = ("h", "weight", "bias", "x", "kernel", "table")


def operands(
    dtype: torch.dtype, num: int = 7, vocabulary: int = 23, hidden: int = 5, width: int = 6
) -> dict[str, Tensor]:
    """Random operands with unequal row norms and logits of a few nats."""
    rng = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)

    return {
        "h": normal(num, hidden),
        "weight": normal(vocabulary, hidden),
        "bias": normal(vocabulary),
        "x": normal(num, width),
        "kernel": normal(num).abs() + 0.5,
        "table": normal(vocabulary, width),
    }


def dense(parts: dict[str, Tensor], targets: Tensor) -> dict[str, Tensor]:
    """The definition, written out with materialised logits."""
    total = parts["h"] @ parts["weight"].T + parts["bias"]
    total = total + parts["kernel"][:, None] * (parts["x"] @ parts["table"].T)
    w = total.softmax(-1)
    return {
        "mu": w @ parts["table"],
        "log_normaliser": total.logsumexp(-1),
        "token": total.argmax(-1),
        "top_weight": w.amax(-1),
        "entropy": -(w * total.log_softmax(-1)).sum(-1),
        "cross_entropy": torch.nn.functional.cross_entropy(total, targets, reduction="none"),
    }


def fused(parts: dict[str, Tensor], targets: Tensor, **options: Any) -> dict[str, Tensor]:
    done = weigh(
        parts["h"],
        parts["weight"],
        parts["bias"],
        parts["x"],
        parts["kernel"],
        parts["table"],
        targets=targets,
        token=True,
        top_weight=True,
        entropy=True,
        **options,
    )
    return {name: getattr(done, name) for name in dense(parts, targets)}


@pytest.fixture(params=["one tile", "tiles", "tiles and row blocks"])
def cutting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Options for three ways to cut 7 x 23: whole, in ragged vocabulary tiles, in ragged tiles of both."""
    if request.param == "one tile":
        return {}
    if request.param == "tiles and row blocks":
        monkeypatch.setattr(fused_module, "CPU_CELLS", 15)
    return {"tile": 5}


@pytest.mark.parametrize("keep", [0, 7 * 4 * 8 * 2, 1 << 20], ids=["recompute", "keep some", "keep all"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_equal_dense_autograd(cutting: dict[str, int], dtype: torch.dtype, keep: int) -> None:
    parts = operands(dtype)
    targets = torch.tensor([0, 4, 5, 22, 11, 9, 14])
    rng = torch.Generator().manual_seed(8)
    shapes = {"mu": (7, 6), "log_normaliser": (7,), "cross_entropy": (7,)}
    pull = {name: torch.randn(shape, generator=rng).to(dtype) for name, shape in shapes.items()}
    results = []
    for route in (lambda p: dense(p, targets), lambda p: fused(p, targets, keep=keep, **cutting)):
        leaves = {name: value.clone().requires_grad_() for name, value in parts.items()}
        values = route(leaves)
        sum((pull[name] * values[name]).sum() for name in pull).backward()  # type: ignore[union-attr]
        results.append((values, {name: leaf.grad for name, leaf in leaves.items()}))
    (expected, expected_grads), (found, found_grads) = results
    tight, loose = (1e-5, 1e-4) if dtype == torch.float32 else (1e-12, 1e-11)
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], rtol=tight, atol=tight, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name in NAMES:
        torch.testing.assert_close(
            found_grads[name], expected_grads[name], rtol=loose, atol=loose, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("keep", [0, 1 << 20])
def test_gradcheck(cutting: dict[str, int], keep: int) -> None:
    parts = operands(torch.float64, num=3, vocabulary=7, hidden=2, width=3)
    targets = torch.tensor([0, 6, 5])

    def route(*leaves: Tensor) -> tuple[Tensor, ...]:
        done = weigh(*leaves, targets=targets, keep=keep, **cutting)  # type: ignore[arg-type]
        return done.mu, done.log_normaliser, done.cross_entropy  # type: ignore[return-value]

    # A second backward pass makes the kept tiles again, which differs in the last bit.
    leaves = [parts[name].requires_grad_() for name in NAMES]
    assert torch.autograd.gradcheck(route, leaves, nondet_tol=1e-12)


@pytest.mark.parametrize("asked", ["mu", "log_normaliser", "cross_entropy"])
@pytest.mark.parametrize("only", NAMES)
def test_each_gradient_alone(only: str, asked: str) -> None:
    parts = operands(torch.float64)
    targets = torch.arange(7)
    grads = []
    for route in (dense, fused):
        leaves = {name: value.clone().requires_grad_(name == only) for name, value in parts.items()}
        route(leaves, targets)[asked].square().sum().backward()
        assert all(leaf.grad is None for name, leaf in leaves.items() if name != only)
        grads.append(leaves[only].grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-11, atol=1e-11)


def gaussian_posterior(base: Tensor, x: Tensor, alpha: Tensor, sigma: Tensor, table: Tensor) -> Tensor:
    """w_j proportional to f_j exp(-||x - alpha e_j||^2 / (2 sigma^2)), from the distances themselves."""
    squared = (x[:, None] - alpha[:, None, None] * table).pow(2).sum(-1)
    return torch.softmax(base.log_softmax(-1) - squared / (2 * sigma[:, None] ** 2), -1)


def test_weights_are_the_gaussian_posterior() -> None:
    parts = operands(torch.float64, vocabulary=5)
    table = parts["table"] / parts["table"].norm(dim=-1, keepdim=True) * math.sqrt(6)
    alpha = torch.linspace(0.1, 0.9, 7, dtype=torch.float64)
    sigma = (1 - alpha**2).sqrt()
    base = parts["h"] @ parts["weight"].T + parts["bias"]
    call = (parts["h"], parts["weight"], parts["bias"], parts["x"], alpha / sigma**2)

    w = gaussian_posterior(base, parts["x"], alpha, sigma, table)
    assert (logits(*call, table).softmax(-1) - w).abs().max() < 1e-10
    assert (weigh(*call, table, tile=2).mu - w @ table).abs().max() < 1e-10

    # The kernel is an inner product because the rows have equal norms; without them it is another posterior.
    table[2] *= 1.5
    w = gaussian_posterior(base, parts["x"], alpha, sigma, table)
    assert (weigh(*call, table, tile=2).mu - w @ table).abs().max() > 1e-3


def test_leading_shape_and_broadcast_kernel() -> None:
    parts = operands(torch.float64, num=12)
    h, x = parts["h"].reshape(3, 4, -1), parts["x"].reshape(3, 4, -1)
    kernel = parts["kernel"][:3, None].clone().requires_grad_()
    targets = torch.zeros(3, 4, dtype=torch.long)
    done = weigh(h, parts["weight"], None, x, kernel, parts["table"], targets=targets, tile=5)
    assert done.mu.shape == (3, 4, 6)
    assert done.cross_entropy is not None and done.cross_entropy.shape == (3, 4)
    assert done.token is None and done.entropy is None and done.top_weight is None
    total = logits(h, parts["weight"], None, x, kernel, parts["table"])
    torch.testing.assert_close(done.log_normaliser, total.logsumexp(-1))
    (found,) = torch.autograd.grad(done.log_normaliser.sum(), kernel)
    (expected,) = torch.autograd.grad(total.logsumexp(-1).sum(), kernel)
    torch.testing.assert_close(found, expected)


def test_base_logits_alone() -> None:
    parts = operands(torch.float64)
    done = weigh(parts["h"], parts["weight"], parts["bias"], None, None, parts["table"], tile=5)
    w = (parts["h"] @ parts["weight"].T + parts["bias"]).softmax(-1)
    torch.testing.assert_close(done.mu, w @ parts["table"])


def test_shared_scores_change_nothing() -> None:
    parts = operands(torch.float64)
    call = [parts[name].clone().requires_grad_() for name in NAMES[:6]]
    scores = kernel_scores(call[3], call[5])
    torch.testing.assert_close(scores, parts["x"] @ parts["table"].T)
    with_scores = weigh(*call, scores=scores.detach(), tile=5)  # type: ignore[arg-type]
    without = weigh(*call, tile=5)  # type: ignore[arg-type]
    torch.testing.assert_close(with_scores.mu, without.mu)
    found = torch.autograd.grad(with_scores.mu.sum(), call)
    expected = torch.autograd.grad(without.mu.sum(), call)
    torch.testing.assert_close(found, expected)


def test_kernel_scores_in_tiles(cutting: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    if cutting:
        monkeypatch.setattr(fused_module, "CPU_TILE", cutting["tile"])
    parts = operands(torch.float64, num=8)
    x = parts["x"].reshape(2, 4, -1)
    torch.testing.assert_close(kernel_scores(x, parts["table"]), x @ parts["table"].T)


@pytest.mark.parametrize("keep", [0, 1 << 20], ids=["recompute", "keep all"])
@pytest.mark.parametrize("rise", [0.0, 30.0, 200.0, -200.0])
def test_sums_alone_measure_tiles_against_an_earlier_peak(rise: float, keep: int, cutting: dict[str, int]) -> None:
    """Without questions about the maximum a tile's own is not looked for, however much later logits rise or fall."""
    parts = operands(dtype=torch.float64)
    parts["bias"][11:] += rise
    targets = torch.arange(len(parts["h"])) * 3
    leaves = {name: part.clone().requires_grad_() for name, part in parts.items()}
    expected = dense(leaves, targets)
    shared = {name: part.clone().requires_grad_() for name, part in parts.items()}
    found = weigh(
        shared["h"],
        shared["weight"],
        shared["bias"],
        shared["x"],
        shared["kernel"],
        shared["table"],
        targets=targets,
        keep=keep,
        **cutting,
    )
    for name in ("mu", "log_normaliser", "cross_entropy"):
        torch.testing.assert_close(getattr(found, name), expected[name], rtol=1e-9, atol=1e-9)
    (found.mu.sum() + found.cross_entropy.sum()).backward()
    (expected["mu"].sum() + expected["cross_entropy"].sum()).backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(shared[name].grad, leaf.grad, rtol=1e-7, atol=1e-9)


def test_huge_logits_stay_finite() -> None:
    """A strong kernel moves logits by far more than exp can hold, rising and falling over the tiles."""
    parts = operands(torch.float32)
    parts["kernel"] = parts["kernel"] * 1e4
    targets = torch.arange(7)
    for order in (torch.arange(23), torch.arange(23).flip(0)):
        turned = {**parts, **{name: parts[name][order] for name in ("weight", "bias", "table")}}
        done, expected = fused(turned, targets, tile=3), dense(turned, targets)
        for name in expected:
            assert done[name].isfinite().all()
            torch.testing.assert_close(done[name], expected[name], rtol=1e-4, atol=1e-4)


def test_autocast_and_half_precision_inputs_are_computed_in_float32() -> None:
    parts = operands(torch.float32)
    plain = weigh(*(parts[name] for name in NAMES[:6]))
    leaves = [parts[name].clone().requires_grad_() for name in NAMES[:6]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = weigh(*leaves)  # type: ignore[arg-type]
        cast.mu.sum().backward()
    assert cast.mu.dtype == torch.float32
    torch.testing.assert_close(cast.mu, plain.mu, rtol=0, atol=0)
    half = parts["h"].bfloat16().requires_grad_()
    done = weigh(half, *(parts[name] for name in NAMES[1:6]))
    wide = weigh(half.detach().float(), *(parts[name] for name in NAMES[1:6]))
    torch.testing.assert_close(done.mu, wide.mu)
    done.mu.sum().backward()
    assert half.grad is not None and half.grad.dtype == torch.bfloat16


def test_float64_state_does_not_widen_the_head() -> None:
    parts = operands(torch.float32)
    wide = {name: parts[name].double() for name in ("x", "kernel")}
    done = weigh(*({**parts, **wide}[name] for name in NAMES[:6]))
    assert done.mu.dtype == torch.float32
    assert kernel_scores(parts["x"].double(), parts["table"]).dtype == torch.float32


def test_products_of_the_kernel_term_are_exact_and_the_setting_returns() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with exact_products():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("tile", [None, 1, 5])
def test_nearest_is_brute_force(tile: int | None) -> None:
    parts = operands(torch.float64, num=40)
    x, table = parts["x"].reshape(5, 8, 6), parts["table"]
    scale = torch.linspace(0.1, 1.5, 5, dtype=torch.float64)[:, None]
    distances = torch.cdist(x, table[None] * scale[:, :, None]).sort(-1)
    found = nearest(x, table, scale=scale, second=True, tile=tile)
    assert torch.equal(found.token, distances.indices[..., 0])
    torch.testing.assert_close(found.distance, distances.values[..., 0])
    torch.testing.assert_close(found.second_distance, distances.values[..., 1])
    alone = nearest(x, table, tile=tile)
    assert torch.equal(alone.token, torch.cdist(x, table[None].expand(5, -1, -1)).argmin(-1))
    assert alone.second_distance is None


def test_nearest_distance_does_not_cancel() -> None:
    """At a distance of 1e-4 from a row of norm 30 the expanded square would lose every digit in float32."""
    table = torch.randn(11, 16, generator=torch.Generator().manual_seed(0)) * 8
    x = table[3] + 1e-4 / 4
    found = nearest(x[None], table, tile=4)
    assert found.token.tolist() == [3]
    assert abs(found.distance.item() - 1e-4) < 5e-6
