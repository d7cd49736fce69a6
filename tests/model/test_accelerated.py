"""The head of accelerators against the float64 formula: plain torch on a CPU, Triton's kernels under its interpreter.

The interpreter's products of bfloat16 are wrong, so numbers are checked in float16 and float32; `test_compiled.py`
compiles the kernels for bfloat16.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from convergeflow.device import DOUBLE, FULL, HALF, Memory, Precision
from convergeflow.model import accelerated, fused

MEMORY = Memory(8 << 30, 4 << 30)
NAMES = ("h", "weight", "bias", "x", "kernel", "table")
FLOAT16 = Precision(torch.float16, torch.float16, torch.float32, torch.float16, torch.float64)
FLOAT32 = FULL
FORMATS = {"float16": FLOAT16, "float32": FLOAT32, "bfloat16": HALF, "float64": DOUBLE}


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KINDS = ["triton"] if INTERPRETED else ["torch"]


@pytest.mark.slow
def test_the_kernels_under_the_interpreter() -> None:
    """All tests of this file that name a kind, with Triton's: it reads its mode when it is imported, once."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-k", "triton", __file__]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 45, done.stdout


def problem(num: int, vocabulary: int, hidden: int, width: int, strength: float = 1.0) -> dict[str, Tensor]:
    """Operands as in a trained model: rows of the table have norm sqrt(width), states lie between noise and words."""
    rng = torch.Generator().manual_seed(num + vocabulary)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    table = torch.nn.functional.normalize(normal(vocabulary, width), dim=-1) * width**0.5
    alpha = torch.linspace(0.05, 0.5, num, dtype=torch.float64)
    sigma = (1 - alpha**2).sqrt()
    words = torch.randint(vocabulary, (num,), generator=rng)
    return {
        "h": normal(num, hidden),
        "weight": normal(vocabulary, hidden) * hidden**-0.5,
        "bias": normal(vocabulary) * 0.3,
        "x": alpha[:, None] * table[words] + sigma[:, None] * normal(num, width),
        "kernel": strength * alpha / sigma**2,
        "table": table,
    }


def formula(parts: dict[str, Tensor], targets: Tensor) -> dict[str, Tensor]:
    """The definition, in the format of the parts."""
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


def ours(parts: dict[str, Tensor], targets: Tensor | None, **options: Any) -> fused.Weighted:
    asked = {"token": True, "top_weight": True, "entropy": True, **options}
    return fused.weigh(*(parts[name] for name in NAMES), targets=targets, **asked)  # type: ignore[arg-type]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


Use = Callable[..., None]


@pytest.fixture(params=KINDS)
def use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Use:
    """Lets the head run in tiles of one kind and in given formats, as if this CPU were an accelerator."""
    make: Any = accelerated.TorchTiles
    if request.param == "triton":
        from convergeflow.model import triton_head

        small = triton_head.Blocks(rows=16, tokens=32, depth=16, kernel_depth=16, warps=4, stages=2)

        def make(operands: accelerated.Prepared) -> Any:
            return triton_head.TritonTiles(operands, small)

    def choose(formats: Precision, memory: Memory = MEMORY) -> None:
        monkeypatch.setattr(fused, "_way", lambda table: accelerated.Accelerated(make, formats, memory))

    choose.kind = request.param  # type: ignore[attr-defined]
    return choose


SHAPES = {"odd": (37, 211, 24, 40), "one part": (3, 20, 16, 16), "narrow": (5, 70, 1, 7), "even": (32, 128, 32, 32)}


@pytest.mark.parametrize("tile", [None, 64, 48], ids=["one tile", "tiles", "ragged tiles"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_float32_equals_the_float64_formula(use: Use, shape: str, tile: int | None) -> None:
    use(FLOAT32)
    parts = problem(*SHAPES[shape])
    targets = torch.arange(len(parts["h"])) * 5 % len(parts["table"])
    expected = formula(parts, targets)
    found = ours({name: part.float() for name, part in parts.items()}, targets, tile=tile)
    assert torch.equal(found.token, expected["token"])  # type: ignore[arg-type]
    for name in ("mu", "log_normaliser", "top_weight", "entropy", "cross_entropy"):
        assert relative(getattr(found, name), expected[name]) < 1e-5, name


@pytest.mark.parametrize("strength", [1.0, 40.0], ids=["noise", "data"])
@pytest.mark.parametrize("formats", ["float16", "bfloat16"])
def test_half_precision_keeps_the_kernel_term(use: Use, formats: str, strength: float) -> None:
    """The kernel term, hundreds of nats near the data, is right to 1e-5; the base logits to their format."""
    if use.kind == "triton" and formats == "bfloat16":  # type: ignore[attr-defined]
        formats = "float16"  # the interpreter's bfloat16 is wrong
    use(FORMATS[formats])
    parts = problem(29, 300, 24, 40, strength)
    parts["h"], parts["weight"] = (parts[name].to(FORMATS[formats].base).double() for name in ("h", "weight"))
    targets = torch.arange(29)
    expected = formula(parts, targets)
    found = ours({name: part.float() for name, part in parts.items()}, targets, tile=64)
    assert torch.equal(found.token, expected["token"])  # type: ignore[arg-type]
    # Operands that are exact in half precision: what is left is the error of the kernel term and of the sums.
    assert relative(found.log_normaliser, expected["log_normaliser"]) < 1e-5
    assert relative(found.cross_entropy, expected["cross_entropy"]) < 1e-5  # type: ignore[arg-type]
    bound = {"float16": 2e-3, "bfloat16": 8e-3}[formats]
    assert relative(found.mu, expected["mu"]) < bound


@pytest.mark.parametrize("keep", [0, 29 * 64 * 2 * 2, 1 << 24], ids=["recompute", "keep some", "keep all"])
@pytest.mark.parametrize("formats", ["float32", "float16"])
def test_gradients_equal_the_float64_formula(use: Use, formats: str, keep: int) -> None:
    use(FORMATS[formats])
    parts = problem(29, 211, 24, 40)
    targets = torch.arange(29) * 7 % 211
    rng = torch.Generator().manual_seed(1)
    pull = torch.randn(29, 40, generator=rng, dtype=torch.float64)
    grads = []
    for dtype in (torch.float64, torch.float32):
        leaves = {name: part.detach().to(dtype, copy=True).requires_grad_() for name, part in parts.items()}
        if dtype == torch.float64:
            done = formula(leaves, targets)
        else:
            weighted = ours(leaves, targets, tile=64, keep=keep)
            done = {name: getattr(weighted, name) for name in ("mu", "cross_entropy", "log_normaliser")}
        total = (done["mu"] * pull.to(dtype)).sum() + done["cross_entropy"].sum() + 0.3 * done["log_normaliser"].sum()
        total.backward()
        grads.append({name: leaf.grad for name, leaf in leaves.items()})
    bound = 2e-5 if formats == "float32" else 2e-3
    for name in NAMES:
        assert relative(grads[1][name], grads[0][name]) < bound, name  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", ["mu", "cross_entropy", "log_normaliser"])
@pytest.mark.parametrize("only", NAMES)
def test_each_gradient_alone(use: Use, only: str, asked: str) -> None:
    use(FLOAT32)
    parts, targets, grads = problem(5, 40, 8, 12), torch.arange(5), []
    for dtype in (torch.float64, torch.float32):
        leaves = {name: part.detach().to(dtype, copy=True).requires_grad_(name == only) for name, part in parts.items()}
        value = formula(leaves, targets)[asked] if dtype == torch.float64 else getattr(ours(leaves, targets), asked)
        value.square().sum().backward()
        assert all(leaf.grad is None for name, leaf in leaves.items() if name != only)
        grads.append(leaves[only].grad)
    assert relative(grads[1], grads[0]) < 2e-5


def test_shared_scores_no_bias_and_base_logits_alone(use: Use) -> None:
    use(FLOAT32)
    parts = {name: part.float() for name, part in problem(21, 90, 24, 40).items()}
    scores = fused.kernel_scores(parts["x"], parts["table"])
    assert relative(scores, parts["x"].double() @ parts["table"].double().T) < 1e-6
    call = [parts[name].clone().requires_grad_() for name in NAMES]
    plain, shared = fused.weigh(*call, tile=32), fused.weigh(*call, scores=scores, tile=32)  # type: ignore[arg-type]
    torch.testing.assert_close(shared.mu, plain.mu, rtol=1e-5, atol=1e-5)
    for mine, other in zip(*(torch.autograd.grad(each.mu.sum(), call) for each in (plain, shared)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    alone = fused.weigh(parts["h"], parts["weight"], None, None, None, parts["table"], tile=32)
    w = (parts["h"].double() @ parts["weight"].double().T).softmax(-1)
    assert relative(alone.mu, w @ parts["table"].double()) < 1e-5


def test_scores_of_half_precision_tiles_are_float32(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FLOAT16 if use.kind == "triton" else HALF)  # type: ignore[attr-defined]
    parts = problem(21, 90, 24, 40)
    found = fused.kernel_scores(parts["x"].float(), parts["table"].float())
    expected = parts["x"].float().double() @ parts["table"].float().double().T
    assert relative(found, expected) < 1e-6
    x, kernel, table = (parts[name].float() for name in ("x", "kernel", "table"))
    h, weight = (parts[name].half().float() for name in ("h", "weight"))
    done = fused.weigh(h, weight, None, x, kernel, table, scores=found, tile=32)
    total = (
        h.to(torch.float16 if use.kind == "triton" else torch.bfloat16).double()  # type: ignore[attr-defined]
        @ weight.to(torch.float16 if use.kind == "triton" else torch.bfloat16).double().T  # type: ignore[attr-defined]
        + kernel.double()[:, None] * expected
    )
    assert relative(done.log_normaliser, total.logsumexp(-1)) < 1e-5


def test_peaks_that_rise_from_tile_to_tile(use: Use) -> None:
    """Every part of every tile is measured against a peak that a later one exceeds by more than exp can hold."""
    use(FLOAT32)
    parts = problem(9, 160, 16, 16)
    parts["bias"] += torch.arange(160) * 3.0
    targets = torch.arange(9)
    expected = formula(parts, targets)
    found = ours({name: part.float() for name, part in parts.items()}, targets, tile=64)
    for name in ("mu", "log_normaliser", "entropy", "cross_entropy"):
        assert relative(getattr(found, name), expected[name]) < 1e-5, name
    falling = {**parts, "bias": parts["bias"].flip(0)}
    again = ours({name: part.float() for name, part in falling.items()}, targets, tile=64)
    assert relative(again.mu, formula(falling, targets)["mu"]) < 1e-5


def test_no_rows(use: Use) -> None:
    """Where every position is decided nothing is left for the head."""
    use(FLOAT32)
    parts = {name: part.float() for name, part in problem(4, 100, 16, 16).items()}
    for name in ("h", "x", "kernel"):
        parts[name] = parts[name][:0].requires_grad_()
    parts["weight"].requires_grad_()
    found = ours(parts, torch.zeros(0, dtype=torch.long))
    assert found.mu.shape == (0, 16)
    for name in ("log_normaliser", "token", "top_weight", "entropy", "cross_entropy"):
        assert getattr(found, name).shape == (0,), name
    (found.mu.sum() + found.cross_entropy.sum()).backward()  # type: ignore[union-attr]
    assert parts["h"].grad is not None and not parts["weight"].grad.any()  # type: ignore[union-attr]
    assert fused.kernel_scores(parts["x"].detach(), parts["table"]).shape == (0, 100)


def test_the_lowest_id_among_equals(use: Use) -> None:
    use(FLOAT32)
    parts = {name: part.float() for name, part in problem(4, 100, 16, 16).items()}
    parts = {**parts, "h": torch.zeros(4, 16), "bias": torch.zeros(100), "kernel": torch.zeros(4)}
    assert ours(parts, None, tile=32).token.tolist() == [0] * 4  # type: ignore[union-attr]


def test_rows_are_cut_where_memory_is_small(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FLOAT32, Memory(16 * 64 * 64 * 16, 1 << 20))
    monkeypatch.setattr(accelerated, "LEAST_TOKENS", 64)
    parts = problem(70, 150, 16, 16)
    cut = accelerated.Accelerated(accelerated.TorchTiles, FLOAT32, Memory(16 * 64 * 64 * 16, 1 << 20))
    tiles = accelerated.TorchTiles
    assert len(cut._rows(70, tiles)) > 1  # type: ignore[arg-type]
    found = ours({name: part.float() for name, part in parts.items()}, torch.arange(70))
    assert relative(found.mu, formula(parts, torch.arange(70))["mu"]) < 1e-5


def test_a_float32_is_three_numbers_in_half_precision() -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(50, 768, generator=rng) * 8, torch.randn(40, 768, generator=rng)
    left = torch.cat(accelerated.left_parts(a, torch.bfloat16), 1)
    right = torch.cat(accelerated.right_parts(b, torch.bfloat16), 1)
    found = accelerated.product(left, right.T, torch.float32)
    assert relative(found, a.double() @ b.double().T) < 1e-6


@pytest.mark.parametrize("version", ["2.7", "2.9", "2.10"])
def test_sums_in_float32_ask_each_torch_for_what_it_has(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.8 and 2.9 make float32 of products in half precision, but add them only to a tensor in half precision."""

    def product(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16 and dtype == torch.float32
        made = a.float() @ b.float()
        return made if out is None else out.copy_(made)

    def added(to: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
        if to.dtype != a.dtype and version == "2.9":
            raise RuntimeError(f"self and mat2 must have the same dtype, but got {to.dtype} and {a.dtype}")
        return out.copy_(to + product(a, b, dtype))

    def overloads() -> list[str]:
        return ["default", "out"] if version == "2.7" else ["default", "dtype", "dtype_out", "out"]

    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(f"{version}.0+cu128"))
    for packet, asked in ((torch.ops.aten.mm, product), (torch.ops.aten.addmm, added)):
        monkeypatch.setattr(packet, "dtype_out", asked)
        monkeypatch.setattr(packet, "overloads", overloads)
    monkeypatch.setattr(torch.ops.aten.mm, "dtype", product)
    monkeypatch.setattr(accelerated, "runs_triton", lambda device: True)
    for kept in (accelerated._has_float32_sums, accelerated._adds_to_float32):
        kept.cache_clear()
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(8, 8, generator=rng).bfloat16() for _ in range(2))
    out = torch.full((8, 8), torch.nan)
    accelerated.accumulate(out, a, b, fresh=True)
    accelerated.accumulate(out, b, a, fresh=False)
    torch.testing.assert_close(out, a.float() @ b.float() + b.float() @ a.float())
    for kept in (accelerated._has_float32_sums, accelerated._adds_to_float32):
        kept.cache_clear()


def test_nothing_is_read_from_a_device_without_data() -> None:
    """On the meta device every host read raises, and so does an operation on two devices."""
    parts = {name: part.float().to("meta").requires_grad_() for name, part in problem(6, 50, 16, 16).items()}
    done = ours(parts, torch.zeros(6, dtype=torch.long, device="meta"))
    assert done.mu.is_meta and done.mu.shape == (6, 16)
    (done.mu.sum() + done.cross_entropy.sum()).backward()  # type: ignore[union-attr]
    assert all(part.grad is not None and part.grad.is_meta for part in parts.values())
