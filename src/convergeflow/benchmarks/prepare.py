"""How fast text becomes tokens: `prepare` from a parquet table to a finished corpus, with GPT-2's tokenizer.

The text is made up from a fixed seed: words of GPT-2's vocabulary and compounds of them, as rare as real words are
(Zipf's law), in sentences and documents of about the usual lengths. Its bytes per token are in the record; those of
OpenWebText are about 4.4. On a machine with other work the clock says little: megabytes per second of processor time,
of all processes together, are what one free core would do.
"""

from __future__ import annotations

import importlib
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from convergeflow.benchmarks import measure
from convergeflow.data import encoders
from convergeflow.data.prepare import prepare
from convergeflow.data.tokenizer import gpt2_tokenizer
from convergeflow.errors import UserError

TARGET = 4.0
"""MB/s that two free cores should reach."""
NUM_WORDS = 100_000
TOKENIZER = "gpt2"


def run(megabytes: int = 64, workers: int | None = None) -> dict[str, Any]:
    """MB/s of text by the clock and by processor time, with one process and with `workers` of them."""
    cores = workers or encoders.available_cores()
    with tempfile.TemporaryDirectory() as scratch, _processes_at_once():
        source = Path(scratch) / "set"
        source.mkdir()
        text_bytes = _write_table(source / "train.parquet", 1_000_000 * megabytes)
        cases = {}
        for number in sorted({1, cores}):
            began, spent = time.perf_counter(), _processor_seconds()
            corpus = prepare(
                f"hf:{source}", Path(scratch) / f"out-{number}", tokenizer=TOKENIZER, length=1024, workers=number
            )
            seconds, spent = time.perf_counter() - began, _processor_seconds() - spent
            cases[number] = {
                "MB_per_second": text_bytes / 1e6 / seconds,
                "MB_per_processor_second": text_bytes / 1e6 / spent,
                "seconds": seconds,
                "processor_seconds": spent,
            }
        tokens = sum(corpus.manifest["splits"][split]["tokens"] for split in ("train", "heldout"))
    two_free_cores = 2 * cases[cores]["MB_per_processor_second"]
    return {
        "megabytes": text_bytes / 1e6,
        "bytes_per_token": text_bytes / tokens,
        **{f"workers_{number}": case for number, case in cases.items()},
        "MB_per_second_of_two_free_cores": two_free_cores,
        "target": TARGET,
        "reached": two_free_cores >= TARGET,
        "cores": encoders.available_cores(),
        "machine": measure.machine(),
    }


@contextmanager
def _processes_at_once() -> Iterator[None]:
    """Without the first megabytes that `prepare` encodes by itself."""
    alone, encoders.ALONE = encoders.ALONE, 0
    try:
        yield
    finally:
        encoders.ALONE = alone


def _processor_seconds() -> float:
    """User and system time of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _write_table(file: Path, size: int) -> int:
    """A parquet table of documents, together about `size` bytes; how many they are."""
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as failure:
        raise UserError("parquet files need an extra: pip install 'convergeflow[hub]'") from failure
    texts = list(documents(size))
    parquet.write_table(arrow.table({"text": texts}), file)
    return sum(len(text.encode()) for text in texts)


def documents(size: int) -> Iterator[str]:
    """Made-up documents, together about `size` bytes."""
    rng = np.random.default_rng(0)
    known = [token[1:] for token in gpt2_tokenizer().tokens() if token[0] == "Ġ" and token[1:].isalpha()]
    pairs = rng.integers(0, len(known), (NUM_WORDS - len(known), 2))
    # GPT-2's ids go from frequent to rare.
    words = known + [known[left] + known[right].lower() for left, right in pairs.tolist()]
    ranks = np.cumsum(1.0 / (np.arange(len(words)) + 2.7))
    ranks /= ranks[-1]
    while size > 0:
        lengths = 3 + rng.poisson(15, max(1, int(rng.lognormal(3.5, 1.0))))
        chosen = np.searchsorted(ranks, rng.random(lengths.sum())).tolist()
        numbers, marks = rng.integers(0, 10_000, len(lengths)).tolist(), rng.integers(0, 4, len(lengths)).tolist()
        sentences, first = [], 0
        for length, number, mark in zip(lengths.tolist(), numbers, marks, strict=True):
            said = " ".join([words[index] for index in chosen[first : first + length]])
            first += length
            aside = f", {number}" if number < 3000 else ""
            sentences.append(said[0].upper() + said[1:] + aside + (".", ".", "?", "!\n\n")[mark])
        text = " ".join(sentences)
        size -= len(text)
        yield text
