"""A process of its own for one memory measurement: `python -m convergeflow.benchmarks.worker JOB ARGUMENTS`."""

from __future__ import annotations

import importlib
import json
import sys

if __name__ == "__main__":
    # Only the job's own module: what the others import would count as its memory.
    job = importlib.import_module(f"convergeflow.benchmarks.{sys.argv[1]}")
    print(json.dumps(job.memory(**json.loads(sys.argv[2]))))
