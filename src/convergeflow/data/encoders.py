"""Texts to tokens on all cores, in the order they came.

Each core has a process of its own with a copy of the tokenizer (`python -m convergeflow.data.encoders FOLDER`), because
threads of one process wait for each other in the tokenizer's cache. Texts go in and token bytes come out through pipes;
a process ends when its pipe does, so nothing is left behind when this one is killed. A short text is not worth the
start of a process and is encoded here. Tokens depend on the text alone: the number of processes changes nothing.
"""

from __future__ import annotations

import os
import queue
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from convergeflow.data.corpus import SPLITS
from convergeflow.data.tokenizer import Tokenizer
from convergeflow.errors import ConvergeFlowError, UserError

ALONE = 1 << 23
"""Characters that are encoded in this process before others are started."""

_AHEAD = 2  # batches that wait for each process
_REQUEST = struct.Struct("<I")
_ITEM = np.dtype([("bytes", "<u4"), ("split", "u1"), ("closes", "u1")])
_REPLY = struct.Struct("<BQQ")


class Passage(NamedTuple):
    text: str
    split: str
    closes: bool
    """Whether a document ends with it."""


Packed = dict[str, bytes]
"""The tokens of each split, as they lie on the disk."""


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pack(tokenizer: Tokenizer, dtype: np.dtype[Any], batch: Sequence[Passage]) -> Packed:
    """The tokens of some texts, with the end token behind every document."""
    ids: dict[str, list[int]] = {split: [] for split in SPLITS}
    for item, encoded in zip(batch, tokenizer.encode_batch([item.text for item in batch]), strict=True):
        ids[item.split] += encoded
        if item.closes:
            ids[item.split].append(tokenizer.end_id)
    return {split: np.array(found, dtype=dtype).tobytes() for split, found in ids.items()}


class Encoders:
    """`workers` processes that share the encoding; they start when there is enough to do."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, dtype: np.dtype[Any], workers: int | None) -> None:
        self._folder, self._tokenizer, self._dtype = folder, tokenizer, dtype
        self._workers = workers or available_cores()
        self._all: list[_Process] = []
        self._free: queue.SimpleQueue[_Process] = queue.SimpleQueue()

    def __enter__(self) -> Encoders:
        return self

    def __exit__(self, *failure: object) -> None:
        for process in self._all:
            process.end()

    def packed(self, batches: Iterable[tuple[Sequence[Passage], Any]]) -> Iterator[tuple[Packed, Any]]:
        """The tokens of every batch in order, each with what came along with the batch."""
        seen, waiting = 0, deque[tuple[Future[Packed], Any]]()
        with ThreadPoolExecutor(self._workers) as threads:
            try:
                for batch, companion in batches:
                    if seen < ALONE:
                        seen += sum(len(item.text) for item in batch)
                        yield pack(self._tokenizer, self._dtype, batch), companion
                        continue
                    while len(self._all) < self._workers:
                        self._start()
                    waiting.append((threads.submit(self._ask, batch), companion))
                    if len(waiting) > _AHEAD * self._workers:
                        future, companion = waiting.popleft()
                        yield future.result(), companion
                while waiting:
                    future, companion = waiting.popleft()
                    yield future.result(), companion
            except BaseException:
                # Nobody waits for the rest, and threads that wait for a process must not hold up the way out.
                self.__exit__()
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _start(self) -> None:
        process = _Process(self._folder, self._dtype)
        self._all.append(process)
        self._free.put(process)

    def _ask(self, batch: Sequence[Passage]) -> Packed:
        process = self._free.get()
        try:
            return process.pack(batch)
        finally:
            self._free.put(process)


class _Process:
    """One process and the two ends of its pipes."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            "RAYON_NUM_THREADS": "1",  # one core is this process's share
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "convergeflow.data.encoders", str(folder), dtype.str],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def pack(self, batch: Sequence[Passage]) -> Packed:
        texts = [item.text.encode() for item in batch]
        items = [(len(text), SPLITS.index(item.split), item.closes) for item, text in zip(batch, texts, strict=True)]
        sink, source = self._process.stdin, self._process.stdout
        assert sink is not None and source is not None
        try:
            sink.write(b"".join([_REQUEST.pack(len(batch)), np.array(items, dtype=_ITEM).tobytes(), *texts]))
            sink.flush()
            failed, first, second = _REPLY.unpack(_exactly(source, _REPLY.size))
            parts = [_exactly(source, first), _exactly(source, second)]
        except (EOFError, OSError) as failure:
            raise ConvergeFlowError(
                "a process that encodes text has died (too little memory?); the same command goes on from here, with "
                "fewer `workers` if need be"
            ) from failure
        if failed:
            raise UserError(parts[0].decode())
        return dict(zip(SPLITS, parts, strict=True))

    def end(self) -> None:
        """Let the process go; what it is encoding is not needed."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what waited in it has no reader any more
                    pipe.close()
        self._process.wait()


def _exactly(source: IO[bytes], size: int) -> bytes:
    found = source.read(size)
    if len(found) < size:
        raise EOFError
    return found


def serve(folder: Path, dtype: np.dtype[Any], source: IO[bytes], sink: IO[bytes]) -> None:
    """Answer requests until there are no more."""
    tokenizer = Tokenizer.load(folder)
    while head := source.read(_REQUEST.size):
        (count,) = _REQUEST.unpack(head)
        items = np.frombuffer(_exactly(source, count * _ITEM.itemsize), dtype=_ITEM)
        batch = [
            Passage(_exactly(source, int(item["bytes"])).decode(), SPLITS[item["split"]], bool(item["closes"]))
            for item in items
        ]
        failed = 0
        try:
            first, second = pack(tokenizer, dtype, batch).values()
        except UserError as failure:
            failed, first, second = 1, str(failure).encode(), b""
        sink.write(_REPLY.pack(failed, len(first), len(second)) + first + second)
        sink.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    try:
        serve(Path(sys.argv[1]), np.dtype(sys.argv[2]), sys.stdin.buffer, sys.stdout.buffer)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the asking process is gone
