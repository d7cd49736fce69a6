"""Text in, corpus out: choose a tokenizer, pack the documents, write the blocks and the manifest.

The work is done in a folder beside the target (`NAME.partial`) and renamed when it is whole, so a corpus is there or it
is not. A run that was stopped goes on where its last note to disk says; a run that was finished is not done again.
Documents are written one after another with an end token behind each, and the stream is cut into blocks.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from convergeflow.data import CORPORA
from convergeflow.data.corpus import FORMAT, SPLITS, Corpus
from convergeflow.data.sources import Files, Hub, Progress, Source, find_files, speeches
from convergeflow.data.stories import stories_law
from convergeflow.data.tokenizer import KINDS, Tokenizer, build, stories_tokenizer
from convergeflow.errors import UserError, unknown_name
from convergeflow.files import cache_folder
from convergeflow.randomness import derive_seed

DEFAULT_LENGTH = 64
DEFAULT_VOCABULARY = {"sotu": 1024}
OTHER_VOCABULARY = 4096

_PIECE = 1 << 22  # characters of a long document that are encoded at once
_BATCH = 1 << 20  # characters of short documents that are encoded at once
_NOTE_EVERY = 1 << 24  # tokens between two notes to disk
_LEARN_FROM = 20_000  # documents of a streamed dataset that a tokenizer is learned from


def prepare(
    source: str | Path | Sequence[str | Path] = "stories",
    out: str | Path | None = None,
    *,
    tokenizer: str | None = None,
    vocabulary: int | None = None,
    length: int = DEFAULT_LENGTH,
    seed: int = 0,
    blocks: int = 50_000,
    heldout_blocks: int = 2_000,
    heldout_share: float = 0.05,
    text_field: str = "text",
    dataset_config: str | None = None,
    dataset_split: str = "train",
    documents: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Corpus:
    """A corpus from a name (`stories`, `sotu`), from files or folders, or from a hub dataset (`hf:NAME`).

    A folder that is a prepared corpus is opened as it is. `out` defaults to a folder of the cache named by these
    settings; the second call with the same settings only opens it. `seed`, `blocks` and `heldout_blocks` are for the
    stories; `heldout_share` and `documents` (how many at most) for texts; `text_field` for JSON lines and tables.
    """
    _check_positive(length=length, blocks=blocks, heldout_blocks=heldout_blocks)
    if vocabulary is not None:
        _check_positive(vocabulary=vocabulary)
    if documents is not None:
        _check_positive(documents=documents)
    if not 0 < heldout_share < 1:
        raise UserError(f"`heldout_share` must lie between 0 and 1, not {heldout_share}")
    names = [source] if isinstance(source, (str, Path)) else list(source)
    if not names:
        raise UserError("name a corpus or a file to prepare")
    if len(names) == 1 and (Path(names[0]) / "manifest.json").is_file():
        return _open_as_asked(Path(names[0]), tokenizer, vocabulary, length)
    report = progress or (lambda stage, done, total: None)
    if tokenizer is not None and tokenizer not in KINDS and not (Path(tokenizer) / "tokenizer.json").is_file():
        raise unknown_name("tokenizer", tokenizer, KINDS)

    settings: dict[str, Any] = {"format": FORMAT, "length": length}
    texts: Source | None = None
    if names == ["stories"]:
        words = stories_law().vocabulary
        if tokenizer not in (None, "word") or vocabulary not in (None, len(words)):
            raise UserError(f"the stories are made of words: leave tokenizer and vocabulary out (it has {len(words)})")
        settings |= {"law": stories_law().sha256, "seed": seed, "blocks": [blocks, heldout_blocks]}
        label = "stories"
    else:
        texts = _texts(names, text_field, heldout_share, dataset_config, dataset_split, documents)
        label = texts.name
        kind = tokenizer or "bpe"
        settings |= {"source": texts.key(), "tokenizer": kind, "vocabulary": vocabulary}
        if kind not in KINDS:
            settings["tokenizer"] = Tokenizer.load(kind).sha256
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    if out is None:
        tidy = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in label)[:40]
        folder = cache_folder() / "corpora" / f"{tidy}-{length}-{key[:12]}"
    else:
        folder = Path(out)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(folder):
        if _is_done(folder, key):
            return Corpus.open(folder)
        if folder.exists() and not overwrite and not (folder.is_dir() and not any(folder.iterdir())):
            raise UserError(f"{folder} exists and is not this corpus; choose another folder or allow overwriting it")
        work = _Work(folder, key, length)
        try:
            if texts is None:
                _write_stories(work, seed, {"train": blocks, "heldout": heldout_blocks}, report)
            else:
                default = DEFAULT_VOCABULARY.get(label, OTHER_VOCABULARY)
                _write_texts(work, texts, tokenizer or "bpe", vocabulary, default, report)
        except BaseException as failure:
            work.leave(resumable=not isinstance(failure, UserError))
            raise
        return Corpus.open(folder)


def _only_one(folder: Path) -> FileLock:
    """Two processes that want the same corpus take turns; the second finds it done."""
    locks = cache_folder() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    return FileLock(str(locks / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:20]}.lock"))


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise UserError(f"`{name}` must be at least 1, not {value}")


def _open_as_asked(folder: Path, tokenizer: str | None, vocabulary: int | None, length: int) -> Corpus:
    corpus = Corpus.open(folder)
    kind = corpus.manifest["tokenizer"]["kind"]
    for what, wanted, there in (
        ("blocks of length", length, corpus.length),
        ("a vocabulary of", vocabulary, corpus.vocabulary),
        ("the tokenizer", tokenizer, kind),
    ):
        if wanted is not None and wanted != there:
            raise UserError(
                f"the corpus in {folder} has {what} {there}, not {wanted}; prepare it again or ask for that"
            )
    return corpus


def _texts(
    names: Sequence[str | Path],
    text_field: str,
    heldout_share: float,
    dataset_config: str | None,
    dataset_split: str,
    limit: int | None,
) -> Source:
    first = str(names[0])
    if len(names) == 1 and first == "sotu":
        return speeches(limit=limit)
    if len(names) == 1 and first.startswith("hf:"):
        return Hub(
            first.removeprefix("hf:"),
            config=dataset_config,
            split=dataset_split,
            text_field=text_field,
            heldout_share=heldout_share,
            limit=limit,
        )
    paths = [Path(name) for name in names]
    if len(paths) == 1 and not paths[0].exists() and paths[0].suffix == "" and len(paths[0].parts) == 1:
        raise unknown_name("corpus or file", first, CORPORA)
    files = find_files(paths)
    return Files(paths[0].resolve().stem, files, text_field=text_field, heldout_share=heldout_share, limit=limit)


def _is_done(folder: Path, key: str) -> bool:
    try:
        noted = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(noted.get("key") == key and (folder / "manifest.json").is_file())


class _Work:
    """The unfinished corpus: two growing token streams and a note of how far they are."""

    def __init__(self, target: Path, key: str, length: int) -> None:
        self.target, self.key, self.length = target, key, length
        self.folder = target.with_name(target.name + ".partial")
        self.done: dict[str, Any] = {"documents": 0, "train": 0, "heldout": 0, "train_bytes": 0, "heldout_bytes": 0}
        self.tokenizer: Tokenizer | None = None
        self._streams: dict[str, BinaryIO] = {}
        note = self.folder / "progress.json"
        if note.is_file():
            noted = json.loads(note.read_text(encoding="utf-8"))
            if noted.get("key") == key:
                self.done = noted["done"]
                self.tokenizer = Tokenizer.load(self.folder)
                return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    @property
    def dtype(self) -> np.dtype[Any]:
        assert self.tokenizer is not None
        return np.dtype("<u2" if self.tokenizer.size <= 1 << 16 else "<u4")

    def start(self, tokenizer: Tokenizer) -> None:
        """Open the streams; what an earlier run wrote after its last note is cut off."""
        if self.tokenizer is None:
            tokenizer.save(self.folder)
            self.tokenizer = tokenizer
        for split in SPLITS:
            stream = open(self.folder / f"{split}.bin", "a+b")  # noqa: SIM115 (closed by `finish` or `leave`)
            stream.truncate(self.done[split] * self.dtype.itemsize)
            self._streams[split] = stream
        self.note()

    def append(self, split: str, ids: NDArray[np.int64]) -> None:
        self._streams[split].write(ids.astype(self.dtype).tobytes())
        self.done[split] += ids.size

    def note(self) -> None:
        """Bring everything to disk and say so; a later run can go on from here."""
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
        _write_json(self.folder / "progress.json", {"key": self.key, "done": self.done})

    def leave(self, *, resumable: bool) -> None:
        """Close the files; throw the folder away unless a later run can go on from it."""
        for stream in self._streams.values():
            with suppress(OSError):  # a full disk refuses the last bytes again; the note does not count on them
                stream.close()
        if not resumable or not (self.folder / "progress.json").is_file():
            shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self, name: str, source: dict[str, Any], split_rule: str, packing: str) -> None:
        assert self.tokenizer is not None
        size, length = self.dtype.itemsize, self.length
        train, heldout = self._streams["train"], self._streams["heldout"]
        total = self.done["train"] // length
        if self.done["heldout"] < length and total >= 2:
            # Too little was set aside to fill a block: the last whole block of the training text takes its place.
            train.flush()
            train.seek((total - 1) * length * size)
            last = train.read(length * size)
            heldout.truncate(0)
            heldout.write(last)
            self.done["heldout"], self.done["train"] = length, (total - 1) * length
            split_rule = "the last block of the training text (the rule left less than a block)"
        if self.done["train"] < length or self.done["heldout"] < length:
            tokens = self.done["train"] + self.done["heldout"]
            raise UserError(
                f"too little text: {tokens} tokens do not fill two blocks of {length}; add text or use a smaller length"
            )
        splits: dict[str, dict[str, int]] = {}
        for split, stream in (("train", train), ("heldout", heldout)):
            blocks = self.done[split] // length
            stream.truncate(blocks * length * size)
            splits[split] = {
                "blocks": blocks,
                "tokens": blocks * length,
                "dropped_tokens": self.done[split] - blocks * length,
            }
            if self.done[f"{split}_bytes"]:
                splits[split]["text_bytes"] = self.done[f"{split}_bytes"]
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
        counts = np.zeros(self.tokenizer.size, dtype=np.int64)
        tokens_on_disk = np.memmap(self.folder / "train.bin", dtype=self.dtype, mode="r")
        for first in range(0, len(tokens_on_disk), 1 << 24):
            counts += np.bincount(tokens_on_disk[first : first + (1 << 24)], minlength=self.tokenizer.size)
        np.save(self.folder / "unigram.npy", counts, allow_pickle=False)
        hashed = ("train.bin", "heldout.bin", "unigram.npy", "tokenizer.json")
        manifest = {
            "format": FORMAT,
            "name": name,
            "source": source,
            "tokenizer": {
                "kind": self.tokenizer.kind,
                "size": self.tokenizer.size,
                "sha256": self.tokenizer.sha256,
                "end_id": self.tokenizer.end_id,
            },
            "length": length,
            "dtype": f"uint{8 * size}",
            "packing": packing,
            "separator": f"the end token (id {self.tokenizer.end_id}) behind every document",
            "split": split_rule,
            "splits": splits,
            "sha256": {file: _file_hash(self.folder / file) for file in hashed},
        }
        _write_json(self.folder / "settings.json", {"key": self.key})
        _write_json(self.folder / "manifest.json", manifest)
        (self.folder / "progress.json").unlink()
        if self.target.exists():
            shutil.rmtree(self.target)
        self.folder.rename(self.target)


def _write_stories(work: _Work, seed: int, wanted: dict[str, int], report: Progress) -> None:
    law = stories_law()
    work.start(stories_tokenizer())
    batch = 10_000
    total = sum(wanted.values())
    for split, num in wanted.items():
        written = work.done[split] // work.length
        for first in range(0, num, batch):
            if first < written:
                continue
            rng = np.random.default_rng(derive_seed(seed, "stories", split, first))
            work.append(split, law.sample(rng, min(batch, num - first), work.length))
            work.note()
            report("writing stories", sum(work.done[name] for name in wanted) // work.length, total)
    work.finish(
        "stories",
        {"kind": "stories", "law": law.sha256, "seed": seed},
        "separate seeds",
        "every block starts at a story start; stories follow one another and the last is cut",
    )


def _write_texts(
    work: _Work, source: Source, kind: str, vocabulary: int | None, default: int, report: Progress
) -> None:
    source.survey(report)
    if work.tokenizer is None:
        report("choosing the tokenizer", 0, None)
        work.start(build(kind, _learning_texts(source), vocabulary, default))
    else:
        work.start(work.tokenizer)
    assert work.tokenizer is not None
    end = work.tokenizer.end_id
    number, noted = 0, work.done["train"] + work.done["heldout"]
    total = source.describe().get("documents")
    batch: list[tuple[str, str, bool]] = []
    waiting = 0

    def write_batch() -> None:
        nonlocal waiting
        assert work.tokenizer is not None
        for (text, split, closes), ids in zip(
            batch, work.tokenizer.encode_batch([text for text, _, _ in batch]), strict=True
        ):
            work.append(split, np.array([*ids, end] if closes else ids, dtype=np.int64))
            work.done[f"{split}_bytes"] += len(text.encode())
        batch.clear()
        waiting = 0

    for number, document in enumerate(source.documents(), start=1):
        if number <= work.done["documents"]:
            continue
        pieces = list(_pieces(document.text))
        for index, piece in enumerate(pieces):
            batch.append((piece, document.split, index == len(pieces) - 1))
            waiting += len(piece)
        if waiting >= _BATCH:
            write_batch()
            work.done["documents"] = number
            report("packing", number, total)
            written = work.done["train"] + work.done["heldout"]
            if written - noted >= _NOTE_EVERY:
                work.note()
                noted = written
    write_batch()
    work.done["documents"] = number
    report("packing", number, total)
    if number == 0:
        raise UserError(f"the corpus is empty: {source.name} has no text")
    work.note()
    work.finish(source.name, source.describe(), source.split_rule(), "documents one after another, cut into blocks")


def _learning_texts(source: Source) -> Iterator[str]:
    """What a tokenizer may learn from: training documents only."""
    streamed = isinstance(source, Hub)
    for number, document in enumerate(source.documents()):
        if streamed and number == _LEARN_FROM:
            return
        if document.split == "train":
            yield from _pieces(document.text)


def _pieces(text: str) -> Iterator[str]:
    """A long text in parts that end at a line end, so that memory stays bounded."""
    first = 0
    while len(text) - first > _PIECE:
        last = text.rfind("\n", first, first + _PIECE) + 1
        last = last if last > first else first + _PIECE
        yield text[first:last]
        first = last
    yield text[first:]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """In one step: a reader sees the old file or the new one."""
    scratch = path.with_suffix(".tmp")
    with open(scratch, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def _file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
