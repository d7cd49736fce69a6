"""How soon commands answer: the processor time of whole processes in turns with an import of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median
from typing import Any

from convergeflow.benchmarks import measure
from convergeflow.errors import ConvergeFlowError

CASES = {
    "torch": ["-c", "import torch"],
    "list": ["-m", "convergeflow", "list"],
    "generate": ["-m", "convergeflow", "generate", "-n", "1"],
}
TARGETS = {"list": 0.5, "generate": 2.0}
"""What the commands may cost, in imports of torch."""


def run(repeats: int = 5) -> dict[str, Any]:
    """Median processor seconds (user and system) of each case, and what the commands cost in imports of torch."""
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for turn in range(repeats + 1):
        for name, arguments in CASES.items():
            spent = processor_seconds(arguments)
            if turn:  # the first round fills the file cache
                seconds[name].append(spent)
    medians = {name: median(values) for name, values in seconds.items()}
    ratios = {f"{name}_vs_torch": medians[name] / medians["torch"] for name in TARGETS}
    return {**ratios, "targets": TARGETS, "seconds": medians, "repeats": repeats, "machine": measure.machine()}


def processor_seconds(arguments: list[str]) -> float:
    """What a Python process with these arguments costs, its start included."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, *arguments], **quiet)  # type: ignore[call-overload]
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ConvergeFlowError(f"python {' '.join(arguments)} failed with exit code {process.returncode}")
    return float(usage.ru_utime + usage.ru_stime)
