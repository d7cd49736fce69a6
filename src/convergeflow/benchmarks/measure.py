"""How things are measured here: alternating runs and medians for time, fresh processes for memory, counted FLOPs.

Alternation makes drift and other work on the machine hit every contestant alike; a GEMM runs in the same rotation, so
"fraction of peak" compares rates of the same minutes. FLOPs are those of matrix products, two per multiply-add,
counted from shapes: what the rest costs lowers the fraction, as it should.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch

from convergeflow.errors import ConvergeFlowError

GEMM_SIDE = 2048
GEMM = "gemm"


class Times(NamedTuple):
    """Median seconds of each case: on the clock, and of processor time over all threads.

    The second barely depends on what else the machine does, but hides what threads lose by waiting for each other.
    """

    wall: dict[str, float]
    processor: dict[str, float]


def alternate(cases: Mapping[str, Callable[[], Any]], repeats: int, warm_up: int = 1) -> Times:
    """Run the cases in turn `repeats` times after `warm_up` uncounted rounds."""
    wall: dict[str, list[float]] = {name: [] for name in cases}
    processor: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(warm_up + repeats):
        for name, case in cases.items():
            start, start_processor = time.perf_counter(), time.process_time()
            result = case()
            elapsed, elapsed_processor = time.perf_counter() - start, time.process_time() - start_processor
            del result  # freeing it is not part of the case, and must not overlap the next one
            if turn >= warm_up:
                wall[name].append(elapsed)
                processor[name].append(elapsed_processor)
    return Times(*({name: median(values) for name, values in table.items()} for table in (wall, processor)))


def gemm_case() -> Callable[[], None]:
    """The product of two square float32 matrices: this machine's peak, as far as its library reaches it."""
    left, right = torch.randn(GEMM_SIDE, GEMM_SIDE), torch.randn(GEMM_SIDE, GEMM_SIDE)
    out = torch.empty(GEMM_SIDE, GEMM_SIDE)

    def run() -> None:
        for _ in range(4):
            torch.mm(left, right, out=out)

    return run


def gemm_rate(seconds: float) -> float:
    """FLOP/s of one `gemm_case`."""
    return 4 * 2 * GEMM_SIDE**3 / seconds


def fraction_of_peak(flops: float, seconds: Mapping[str, float], name: str) -> float:
    """Rate of a case over the rate of the GEMM of the same rotation."""
    return flops / seconds[name] / gemm_rate(seconds[GEMM])


def trunk_flops(rows: int, length: int, width: int, depth: int) -> float:
    """One call of the network's trunk on `rows` positions in sequences of `length`."""
    per_block = 2 * rows * 12 * width**2 + 4 * rows * length * width
    return float(depth * per_block + 2 * rows * 2 * width**2)


def head_flops(rows: int, width: int, vocabulary: int, products: int = 3) -> float:
    """`products` passes of rows x width x vocabulary: base logits, kernel, mean."""
    return float(products * 2 * rows * width * vocabulary)


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else (float("nan"),) * 3
    return {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load_average": round(load[0], 2),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def peak_of_process() -> float:
    """The highest resident memory of this process so far, MB."""
    # Not the usage counter where it can be avoided: Linux lets a child start from its parent's peak.
    return _status("VmHWM") if Path("/proc/self/status").exists() else _highest()


def resident() -> float:
    """Resident memory now, MB."""
    return float(psutil.Process().memory_info().rss / 2**20)


class PeakMemory:
    """Resident memory of this process, in MB: at entry, and the peak until exit."""

    before: float
    peak: float

    def __enter__(self) -> PeakMemory:
        self.resettable = _reset_peak()
        self.before = resident() if self.resettable else _highest()
        return self

    def __exit__(self, *failure: object) -> None:
        self.peak = _status("VmHWM") if self.resettable else _highest()

    @property
    def extra(self) -> float:
        return self.peak - self.before


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not Linux: the peak so far stands in, which hides what stays below it
        return False
    return True


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise ConvergeFlowError(f"this system does not report {field}")


def _highest() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 * 1024 if sys.platform == "darwin" else 1024)


def in_fresh_process(job: str, **arguments: Any) -> dict[str, Any]:
    """The result of a named job of `worker`, run in a process without a past."""
    command = [sys.executable, "-m", "convergeflow.benchmarks.worker", job, json.dumps(arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConvergeFlowError(f"the measuring process for {job!r} failed: {last}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
