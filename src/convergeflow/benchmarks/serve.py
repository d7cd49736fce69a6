"""A server under load: clients on loopback, every answer held against `sample`, rates beside one-at-a-time serving.

The server is a process of its own, as a user starts one. Clients ask for consecutive seeds, each as soon as it has its
answer, for a fixed time. What is counted: answers that are lost, repeated or not the sample of their seed; requests per
second and latencies; memory over many requests; and what the network alone gives at the same number of rows.
"""

from __future__ import annotations

import functools
import http.client
import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from convergeflow import zoo
from convergeflow.benchmarks import measure
from convergeflow.errors import ConvergeFlowError
from convergeflow.sampling.plan import preset_for

MODEL, PRESET, CALLS = "stories-small", "sharp", 64
DISTINCT = 128
"""Seeds that are asked for, again and again."""
ROWS = 16
"""What shares a pass, as the server has it by default."""


@dataclass
class Load:
    """What clients saw."""

    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    lost: int = 0
    idents: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


def run(
    clients: Sequence[int] = (8, 32, 128), seconds: float = 120.0, many: int = 5000, calls: int = CALLS
) -> dict[str, Any]:
    """One record: a row for each number of clients, one-at-a-time serving first, then memory over `many` requests."""
    expected = references(calls)
    with served() as (process, port):
        _drive(port, 2, expected, calls, until=time.monotonic() + 3)  # everything is loaded and warm
        rows = [point(process, port, count, expected, calls, seconds) for count in (1, *clients)]
        memory = _memory(process, port, many, references(8))
    network = network_speedup()
    first = rows[0]["requests_per_second"]
    for row in rows:
        row["vs_one_at_a_time"] = row["requests_per_second"] / first
    return {
        "model": MODEL,
        "calls": calls,
        "seconds_each": seconds,
        "load": rows,
        "memory": memory,
        "network_alone": network,
        "machine": measure.machine(),
    }


def references(calls: int) -> list[list[int]]:
    """The tokens of every seed, as `generate` makes them."""
    model = zoo.load_model(MODEL)
    flow = model.as_flow()
    assert flow is not None
    settings = preset_for(PRESET, flow.schedule, nfe=calls)
    return list(flow.sample(DISTINCT, flow.config.length, seeds=range(DISTINCT), settings=settings).ids.tolist())


@contextmanager
def served() -> Iterator[tuple[psutil.Process, int]]:
    """A server process on a free port."""
    command = "convergeflow serve stories-small --port 0 --limit queue=1024"
    process = subprocess.Popen([sys.executable, "-m", *command.split()], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    found = next((found for line in process.stderr if (found := re.search(r"http://[^:]+:(\d+)", line))), None)
    if found is None:
        raise ConvergeFlowError("the server did not start")
    reader = threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True)
    reader.start()
    try:
        yield psutil.Process(process.pid), int(found[1])
    finally:
        process.terminate()
        process.wait(90)
        reader.join()
        process.stderr.close()


def point(
    process: psutil.Process, port: int, count: int, expected: list[list[int]], calls: int, seconds: float
) -> dict[str, Any]:
    """One number of clients for a time."""
    before, began = process.cpu_times(), time.monotonic()
    load = _drive(port, count, expected, calls, until=began + seconds)
    elapsed, after = time.monotonic() - began, process.cpu_times()
    spent = (after.user + after.system) - (before.user + before.system)
    ordered = sorted(load.seconds)
    return {
        "clients": count,
        "requests": len(ordered),
        "wrong": load.wrong,
        "lost": load.lost,
        "repeated": len(ordered) - len(load.idents),
        "requests_per_second": len(ordered) / elapsed,
        "processor_seconds_per_request": spent / max(1, len(ordered)),
        "p50_seconds": ordered[len(ordered) // 2],
        "p99_seconds": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }


def _drive(port: int, count: int, expected: list[list[int]], calls: int, until: float, most: int = 1 << 60) -> Load:
    load, numbers = Load(), itertools.count()

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        while time.monotonic() < until and (number := next(numbers)) < most:
            seed = number % DISTINCT
            own = {"preset": PRESET, "nfe": calls}
            body = json.dumps({"model": MODEL, "seed": seed, "convergeflow": own})
            began = time.monotonic()
            try:
                connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
                answer = json.loads(connection.getresponse().read())
                choice = answer["choices"][0]["convergeflow"]
            except (OSError, http.client.HTTPException, KeyError, ValueError):
                connection.close()
                with load.lock:
                    load.lost += 1
                continue
            with load.lock:
                load.seconds.append(time.monotonic() - began)
                load.idents.add(answer["id"])
                load.wrong += choice["tokens"] != expected[seed] or choice["seed"] != seed
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return load


def _memory(process: psutil.Process, port: int, many: int, expected: list[list[int]]) -> dict[str, Any]:
    """Resident memory of the server over many short requests, in tenths."""
    if many < 10:
        return {}
    sizes, wrong = [], 0
    for _ in range(10):
        load = _drive(port, 32, expected, 8, until=time.monotonic() + 600, most=many // 10)
        sizes.append(round(process.memory_info().rss / 2**20, 1))
        wrong += load.wrong + load.lost
    return {"requests": many, "calls": 8, "clients": 32, "resident_mb": sizes, "wrong_or_lost": wrong}


@torch.no_grad()
def network_speedup(repeats: int = 7) -> dict[str, Any]:
    """What the bare network costs per row at several batches, in processor time, and over its cost at one row.

    With one thread: what threads lose by waiting for each other depends on what else the machine does.
    """
    flow = zoo.load_model(MODEL).as_flow()
    assert flow is not None
    predictor = flow.bind()
    x = torch.randn(ROWS, flow.config.length, flow.config.width, dtype=torch.float64)
    at = flow.schedule(torch.linspace(0.1, 0.9, ROWS, dtype=torch.float64))

    def case(rows: int) -> None:
        part, level = x[:rows], at[slice(0, rows)]
        for _ in range(5):
            predictor(part, level, part).weigh(part, level)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = {str(rows): functools.partial(case, rows) for rows in (1, 8, ROWS)}
        spent = measure.alternate(cases, repeats).processor
    finally:
        torch.set_num_threads(threads)
    each = {rows: 1000 * seconds / 5 / int(rows) for rows, seconds in spent.items()}
    speedups = {f"speedup_{rows}": each["1"] / value for rows, value in each.items() if rows != "1"}
    return {"processor_milliseconds_per_row": each, **speedups}
