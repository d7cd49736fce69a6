"""One table of number formats, obeyed by everything that calls a network, and said by every record."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ten_sentences import LENGTH, TOKENS, fresh

from convergeflow import device, zoo
from convergeflow.cli.main import main
from convergeflow.device import HALF, chosen_precision, precision_of
from convergeflow.model.fused import kernel_scores, weigh
from convergeflow.randomness import RowDraws
from convergeflow.systems import METHODS


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The column of an accelerator, on the CPU."""
    monkeypatch.setitem(device.PRECISIONS, "float32", HALF)
    with chosen_precision("float32"):
        yield


@pytest.mark.parametrize("name", METHODS)
def test_every_network_call_runs_in_the_devices_format(name: str, half: None) -> None:
    model = fresh(name)
    seen: list[torch.dtype | None] = []

    def look(*_: Any) -> None:
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)

    model.network.register_forward_pre_hook(look)
    samples = model.sample(2, LENGTH, seeds=[0, 1], nfe=4)
    model.monitor(TOKENS[:2], draws=RowDraws(range(2)))
    if model.bound_kind is not None:
        model.bound(TOKENS[:2], draws=RowDraws(range(2)), repeats=1)
    assert len(seen) > 4 and set(seen) == {torch.bfloat16}
    assert samples.settings["precision"]["trunk"] == "bfloat16"
    assert samples.settings["precision"]["kernel"] == "float32", "near the data the kernel is tens of nats"


def test_a_gpu_that_emulates_bfloat16_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says yes of a T4 if it is not asked about emulation; kernels in bfloat16 do not compile for it."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda where: True)
    for capability, column in ((7, device.FULL), (8, HALF), (9, HALF)):
        chip = SimpleNamespace(major=capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where, chip=chip: chip)
        assert precision_of(torch.device("cuda")) == column


def test_the_trunk_is_compiled_where_triton_can(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    for installed, capability, pays in ((True, (8, 0), True), (False, (8, 0), False), (True, (6, 0), False)):
        monkeypatch.setattr(device, "has_triton", lambda installed=installed: installed)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where, capability=capability: capability)
        assert device.compiles(cuda) is pays
    assert not device.compiles(torch.device("cpu"))


def test_amd_gpus_run_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton refuses products in split float32 (tf32x3) for them."""
    monkeypatch.setattr(torch.version, "hip", None)
    assert device.runs_triton(torch.device("cuda"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not device.runs_triton(torch.device("cuda"))


def test_a_chosen_precision_ends_with_its_block() -> None:
    with chosen_precision("float64"):
        assert zoo.load_model("stories-small", device="cpu").precision.described()["trunk"] == "float64"
    assert precision_of(torch.device("cpu")) == device.FULL
    assert zoo.load_model("stories-small", device="cpu").precision == device.FULL


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_records_say_what_they_were_computed_in(name: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "record.json"
    command = ["evaluate", "stories-small", "--num", "2", "--nfe", "4", "--precision", name, "--out", str(file)]
    assert main(command) == 0
    said = json.loads(file.read_text())["sampling"]["precision"]
    assert (said["trunk"], said["base"], said["mean"], said["state"]) == (name, name, name, "float64")


def test_the_published_rounding_is_that_of_the_kernel_term_alone() -> None:
    """Against the formula: softmax of base logits plus the kernel term rounded to bfloat16."""
    torch.manual_seed(0)
    h, weight, x = torch.randn(2, 3, 8), torch.randn(40, 8), 4 * torch.randn(2, 3, 16)
    table = 4 * torch.nn.functional.normalize(torch.randn(40, 16), dim=-1)
    kernel = torch.tensor([0.7, 0.0])[:, None].expand(2, 3)
    term = (kernel[..., None] * (x @ table.T)).to(torch.bfloat16).float()
    expected = (h @ weight.T + term).softmax(-1) @ table
    plain = weigh(h, weight, None, x, kernel, table).mu
    scores = kernel_scores(x, table)
    with chosen_precision("published"):
        assert precision_of(torch.device("cpu")).described()["rounded"] == "bfloat16"
        for given in (None, scores):
            found = weigh(h, weight, None, x, kernel, table, scores=given).mu
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert (found - plain)[0].abs().max() > 1e-3 and torch.allclose(found[1], plain[1], atol=1e-5)
    assert "rounded" not in precision_of(torch.device("cpu")).described()
