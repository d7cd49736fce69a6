"""The short form of the campaign and of the fuzzer; `make faults` is the long one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["campaign.py", "--size", "1"], ["fuzz.py", "--examples", "40"]], ids=["kills", "fuzz"]
)
def test_everything_survives(words: list[str]) -> None:
    # In a process of its own, which forks: nothing was computed in it before.
    source = str(HERE.parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CONVERGEFLOW_CACHE"):
        environment.pop(name, None)
    command = [sys.executable, str(HERE / words[0]), *words[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
