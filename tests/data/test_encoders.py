"""Many processes, one result: the number of workers and kills at any moment change nothing."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest

from convergeflow.data import encoders, packing
from convergeflow.data import prepare as room
from convergeflow.data.encoders import Encoders, Passage, pack
from convergeflow.data.packing import Unfinished
from convergeflow.data.prepare import prepare
from convergeflow.data.tokenizer import byte_tokenizer, stories_tokenizer
from convergeflow.errors import ConvergeFlowError, UserError

FILES = ("train.bin", "heldout.bin", "unigram.npy", "tokenizer.json", "manifest.json", "settings.json")


def article(number: int) -> str:
    return f"Article {number}:\n" + " ".join(f"w{(number * place) % 1009}" for place in range(1, 40 + number % 50))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Three tables with an empty row here and there; documents of very different lengths."""
    folder = tmp_path / "set"
    folder.mkdir()
    for file in range(3):
        texts = ["" if number % 41 == 0 else article(number) for number in range(file * 150, file * 150 + 150)]
        texts[7] = "\n".join(article(number) for number in range(60))
        place = folder / f"train-0000{file}-of-00003.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), place, row_group_size=32)
    return folder


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "ALONE", 0)
    monkeypatch.setattr(room, "_BATCH", 3000)
    monkeypatch.setattr(room, "_PIECE", 2500)
    monkeypatch.setattr(room, "_NOTE_EVERY", 4000)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.mark.usefixtures("small_steps")
def test_the_number_of_workers_changes_nothing(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"vocabulary": 300, "length": 32}
    for workers in (1, 3):
        prepare(f"hf:{dataset}", tmp_path / f"by-{workers}", workers=workers, **options)
    monkeypatch.setattr(encoders, "ALONE", 1 << 40)  # no processes at all
    alone = prepare(f"hf:{dataset}", tmp_path / "alone", **options)
    assert contents(tmp_path / "by-1") == contents(tmp_path / "by-3") == contents(alone.folder)
    # Independent of everything above: the documents one by one, in their order, with an end behind each.
    tables = [pyarrow.parquet.read_table(file)["text"].to_pylist() for file in sorted(dataset.iterdir())]
    heldout, train = [], []
    for text in (text for texts in tables for text in texts if text):
        pieces = list(room._pieces(text))
        mark = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        side = heldout if mark < 0.05 * 2**64 else train
        side += [index for piece in pieces for index in alone.tokenizer.encode(piece)] + [alone.tokenizer.end_id]
    assert alone.train.ravel().tolist() == train[: len(train) // 32 * 32]
    assert alone.heldout.ravel().tolist() == heldout[: len(heldout) // 32 * 32]


def test_order_is_kept_and_what_came_along_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "ALONE", 0)
    tokenizer, dtype = byte_tokenizer(), np.dtype("<u2")
    tokenizer.save(tmp_path)
    # Long and short ones in turn, so that later batches are done first.
    batches = [([Passage("ab" * (5000 if n % 3 else 1) + str(n), "train", n % 2 == 0)], n) for n in range(40)]
    with Encoders(tmp_path, tokenizer, dtype, 3) as pool:
        found = list(pool.packed(batches))
    assert found == [(pack(tokenizer, dtype, batch), n) for batch, n in batches]


def test_a_mistake_in_a_worker_is_the_users_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "ALONE", 0)
    tokenizer = stories_tokenizer()
    tokenizer.save(tmp_path)
    with Encoders(tmp_path, tokenizer, np.dtype("<u2"), 2) as pool, pytest.raises(UserError, match="'zzyzx' is not in"):
        list(pool.packed([([Passage("zzyzx", "train", True)], None)]))


def test_a_worker_that_dies_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "ALONE", 0)
    tokenizer = byte_tokenizer()
    tokenizer.save(tmp_path)

    others = set(psutil.Process().children())  # of other tests, as the server that forks for them

    def batches() -> Any:
        for number in range(50):
            yield [Passage("abc", "train", True)], number
            for child in set(psutil.Process().children()) - others:
                child.kill()

    with Encoders(tmp_path, tokenizer, np.dtype("<u2"), 2) as pool, pytest.raises(ConvergeFlowError, match="has died"):
        list(pool.packed(batches()))
    assert set(psutil.Process().children()) <= others


SCRIPT = """
import sys
from convergeflow.data import encoders, prepare as room
encoders.ALONE, room._BATCH, room._PIECE, room._NOTE_EVERY = 0, 3000, 2500, 4000
room.prepare(sys.argv[1], sys.argv[2], vocabulary=300, length=32, workers=2)
"""


@pytest.mark.usefixtures("small_steps")
def test_killed_again_and_again_it_ends_in_the_same_bytes(dataset: Path, tmp_path: Path) -> None:
    unbroken = prepare(f"hf:{dataset}", tmp_path / "unbroken", vocabulary=300, length=32)
    moments, target, kills = random.Random(5), tmp_path / "broken", 0
    partial = tmp_path / "broken.partial"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    while True:
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, f"hf:{dataset}", str(target)], env=environment)
        if kills < 3:
            # Die after some more tokens, wherever that is: before the first, between two notes, at the end.
            wanted = _size(partial) + moments.randrange(0, 40_000)
            deadline = time.monotonic() + 60
            while process.poll() is None and _size(partial) <= wanted and time.monotonic() < deadline:
                time.sleep(0.002)
            children = psutil.Process(process.pid).children() if process.poll() is None else []
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            assert all(is_gone(child) for child in children)  # nothing is left behind
        else:
            assert process.wait(120) == 0
            break
    assert contents(target) == contents(unbroken.folder)
    assert not partial.exists()
    assert sorted(path.name for path in target.iterdir()) == sorted(path.name for path in unbroken.folder.iterdir())


def is_gone(process: psutil.Process) -> bool:
    """Whether a process ends within a while; nobody may be there to collect what is left of it."""
    for _ in range(3000):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def _size(folder: Path) -> int:
    try:
        return (folder / "train.bin").stat().st_size
    except OSError:
        return 0


class Killed(BaseException):
    pass


@pytest.mark.parametrize("short", [False, True])
def test_killed_at_every_change_of_the_disk_it_ends_in_the_same_bytes(
    short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`short` is a text too short to hold anything out by the rule."""
    (tmp_path / "a.txt").write_text("x" * 40 if short else "\n".join(article(number) for number in range(30)))
    options: dict[str, Any] = {"tokenizer": "byte", "length": 16}
    unbroken = prepare(tmp_path / "a.txt", tmp_path / "unbroken", **options)

    def die_at(target: Path, change: int) -> None:
        left = iter(range(1, change))

        def counted(action: Any) -> Any:
            def act(*arguments: Any, **named: Any) -> Any:
                if next(left, None) is None:
                    raise Killed
                return action(*arguments, **named)

            return act

        def keep_all(work: Unfinished, *, resumable: bool) -> None:
            """A kill cleans nothing up; what was written may have come to the disk."""
            for stream in work._streams.values():
                if not stream.closed:
                    stream.flush()

        with monkeypatch.context() as patched:
            patched.setattr(Unfinished, "leave", keep_all)
            patched.setattr(packing, "write_json", counted(packing.write_json))
            patched.setattr(np, "save", counted(np.save))
            patched.setattr(Path, "rename", counted(Path.rename))
            patched.setattr(Path, "unlink", counted(Path.unlink))
            patched.setattr(Unfinished, "append_bytes", counted(Unfinished.append_bytes))
            prepare(tmp_path / "a.txt", target, **options)

    for change in range(1, 100):
        target = tmp_path / f"broken-{change}"
        try:
            die_at(target, change)
            break
        except Killed:
            corpus = prepare(tmp_path / "a.txt", target, **options)
            for name in ("train.bin", "heldout.bin", "unigram.npy", "manifest.json"):
                assert (corpus.folder / name).read_bytes() == (unbroken.folder / name).read_bytes(), (change, name)
    assert 8 < change < 99


@pytest.mark.usefixtures("small_steps")
def test_going_on_reads_only_what_is_left(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(stage: str, done: int, total: int | None) -> None:
        if stage.startswith("packing") and total is not None and done > 0.7 * total:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"vocabulary": 300, "length": 32}
    with pytest.raises(KeyboardInterrupt):
        prepare(f"hf:{dataset}", tmp_path / "out", progress=stop, **options)
    place = json.loads((tmp_path / "out.partial" / "progress.json").read_text())["done"]["place"]
    assert place[0] >= 1  # the first table is behind it
    opened: list[str] = []
    real = pyarrow.parquet.ParquetFile
    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", lambda file: opened.append(Path(file).name) or real(file))
    seen: list[tuple[int, int | None]] = []
    prepare(
        f"hf:{dataset}",
        tmp_path / "out",
        progress=lambda stage, done, total: seen.append((done, total)) if stage.startswith("packing") else None,
        **options,
    )
    assert "train-00000-of-00003.parquet" not in opened
    total = sum(file.stat().st_size for file in dataset.iterdir())
    assert seen[0][0] > 0.5 * total and seen[-1] == (total, total)
    assert all(first <= second for (first, _), (second, _) in itertools.pairwise(seen))
