"""A process of its own for one memory measurement: `python -m convergeflow.benchmarks.worker JOB ARGUMENTS`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from convergeflow.benchmarks import head, sample, train

JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "head": head.memory,
    "sample": sample.memory,
    "train": train.memory,
}

if __name__ == "__main__":
    print(json.dumps(JOBS[sys.argv[1]](**json.loads(sys.argv[2]))))
