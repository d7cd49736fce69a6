"""The head's Triton kernels, compiled for GPUs that are not there, fit into their registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "records" / "triton-kernels.json"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # A process of its own: where Triton was imported as an interpreter, it does not compile.
    folder = tmp_path_factory.mktemp("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-m", "convergeflow.benchmarks.compiled", str(folder / "record.json")]
    subprocess.run(command, check=True, env=environment)
    found: dict[str, Any] = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_no_kernel_spills_and_every_kernel_fits(compiled: dict[str, Any]) -> None:
    assert {kernel["chip"] for kernel in compiled["kernels"]} == {"A100", "H100"}
    for kernel in compiled["kernels"]:
        assert kernel["spill_bytes"] == 0, kernel
        assert kernel["blocks_per_multiprocessor"] >= 1, kernel


@pytest.mark.slow
def test_products_run_on_tensor_cores_in_the_formats_of_the_table(compiled: dict[str, Any]) -> None:
    for kernel in compiled["kernels"]:
        used = " ".join(kernel["products"])
        if kernel["kernel"] == "scores_kernel":
            assert "tf32" in used and "bf16" not in used
        elif kernel["kernel"] == "weights_kernel":
            assert "f32.bf16.bf16" in used
            assert ("tf32" in used) == ("product" in kernel["case"] or "again" in kernel["case"])


@pytest.mark.slow
def test_the_record_is_what_the_command_prints(compiled: dict[str, Any]) -> None:
    assert json.loads(RECORD.read_text(encoding="utf-8")) == compiled
