"""Small models on disk, and servers of their own process, as a user starts them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from convergeflow.data.tokenizer import stories_tokenizer
from convergeflow.systems import METHODS
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel

SHAPE: dict[str, Any] = {"vocabulary": 218, "width": 32, "depth": 2, "heads": 2, "length": 12, "dropout": 0.0}


def write_model(folder: Path, seed: int = 3, method: str = "convergeflow", **changes: Any) -> Path:
    """A model with random weights and the words of the stories."""
    torch.manual_seed(seed)
    if method == "convergeflow":
        model: Any = ConvergeFlowModel(ConvergeFlowConfig(**{**SHAPE, **changes}))
    else:
        cls = METHODS[method]
        model = cls(cls.config_class(**SHAPE))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.tokenizer = stories_tokenizer()
    model.save_pretrained(folder)
    return folder


class Running:
    """A server of its own process, as a user starts it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.lines, self.url = process, [], ""
        self._said = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._said.wait(60), "".join(self.lines)

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:  # it ends with the process
            for line in lines:
                self.lines.append(line)
                if found := re.search(r" at (http://\S+)", line):
                    self.url = found[1]
                    self._said.set()
        self._said.set()

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    def stop(self, how: int = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(60)


@contextmanager
def running(*words: str, **environment: str) -> Iterator[Running]:
    process = subprocess.Popen(
        [sys.executable, "-m", "convergeflow", "serve", "--port", "0", *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    try:
        yield Running(process)
    finally:
        process.kill()
        process.wait(20)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that another thread or process does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
