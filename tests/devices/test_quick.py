"""Float32 products by the faster library: only on the CPUs where it is faster, and only if it does not round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from convergeflow import device
from convergeflow.device import quick_products

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    device._quick.cache_clear()
    yield
    device._quick.cache_clear()


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {"cpu_name": "AMD Ryzen 9", "avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    monkeypatch.setattr(device, "bfloat16_pays", lambda device: bool(found["avx512_bf16"]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return found


def precision_within() -> str:
    with quick_products(CPU):
        return torch.get_float32_matmul_precision()


def test_it_is_taken_where_it_pays_and_given_back(amd: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_rounds", lambda: False)
    assert precision_within() == "medium" and torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(ZeroDivisionError), quick_products(CPU):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == "highest"
    with quick_products(torch.device("meta")):
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("change", [{"cpu_name": "Intel(R) Xeon(R)"}, {"avx512_bf16": False}, {"cpu_name": None}])
def test_other_processors_keep_the_default_library(
    change: dict[str, Any], amd: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_rounds", lambda: False)
    amd |= change
    assert precision_within() == "highest"


def test_a_machine_with_cuda_keeps_its_own_switch(amd: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_rounds", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert precision_within() == "highest"


def test_a_library_that_rounds_is_not_taken(amd: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_rounds", lambda: True)
    assert precision_within() == "highest"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_seen(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 has the ten bits of float16."""
    assert not device._rounds()
    plain = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: plain(a.to(dtype).float(), b.to(dtype).float()))
    assert device._rounds()


def test_products_are_float32_whichever_library_makes_them() -> None:
    """On this machine: the error of 512 products, each rounded once and summed, stays below that of bfloat16."""
    draw = torch.Generator().manual_seed(0)
    left, right = torch.randn(256, 512, generator=draw), torch.randn(512, 256, generator=draw)
    with quick_products(CPU):
        found = left @ right
    bound = 512 * 2.0**-24 * (left.abs().double() @ right.abs().double())
    assert bool(((found.double() - left.double() @ right.double()).abs() <= bound).all())
