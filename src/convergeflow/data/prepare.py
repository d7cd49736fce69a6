"""Text in, corpus out: choose a tokenizer, pack the documents, write the sequences and the manifest.

The work is done in a folder beside the target (`NAME.partial`) and renamed when it is whole, so a corpus is there or it
is not. A run that was stopped goes on where its last note to disk says; a run that was finished is not done again.
Documents are written one after another with an end token behind each, and the stream is cut into sequences.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from pydantic import StrictStr
from typing_extensions import TypedDict

from convergeflow.data import CORPORA
from convergeflow.data.corpus import FORMAT, SETTINGS_FILE, SPLITS, Corpus, Count, fingerprint
from convergeflow.data.sources import Files, Hub, Progress, Source, find_files
from convergeflow.data.stories import stories_law
from convergeflow.data.tokenizer import KINDS, Tokenizer, build, stories_tokenizer
from convergeflow.errors import UserError, unknown_name
from convergeflow.files import DRAFT, cache_folder, file_hash, read_json, sync, write_json
from convergeflow.randomness import derive_seed

DEFAULT_LENGTH = 64
DEFAULT_VOCABULARY = {"sotu": 1024}
OTHER_VOCABULARY = 4096
OWN_FILES = {
    *(f"{split}.bin" for split in SPLITS),
    *("manifest.json", "settings.json", "unigram.npy", "tokenizer.json", "tokenizer_config.json", "progress.json"),
}
"""What a corpus folder holds, and nothing else."""

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
    counts = {"length": length, "blocks": blocks, "heldout_blocks": heldout_blocks}
    for name, value in (counts | {"vocabulary": vocabulary, "documents": documents}).items():
        if value is not None and value < 1:
            raise UserError(f"`{name}` must be at least 1, not {value}")
    if not 0 < heldout_share < 1:
        raise UserError(f"`heldout_share` must lie between 0 and 1, not {heldout_share}")
    names = [source] if isinstance(source, (str, Path)) else list(source)
    if not names:
        raise UserError("name a corpus or a file to prepare")
    if len(names) == 1 and (Path(names[0]) / "manifest.json").is_file():
        return _open_as_asked(Path(names[0]), tokenizer, vocabulary, length)
    if tokenizer is not None and tokenizer not in KINDS and not (Path(tokenizer) / "tokenizer.json").is_file():
        raise unknown_name("tokenizer", tokenizer, KINDS)
    content: _Stories | _Texts
    if names == ["stories"]:
        words = len(stories_law().vocabulary)
        if tokenizer not in (None, "word") or vocabulary not in (None, words):
            raise UserError(f"the stories are made of words: leave `tokenizer` and `vocabulary` out (it has {words})")
        content = _Stories(seed, blocks, heldout_blocks)
    else:
        texts = _texts(names, text_field, heldout_share, dataset_config, dataset_split, documents)
        content = _Texts(texts, tokenizer or "bpe", vocabulary)
    return _prepared(content, length, out, overwrite, progress or (lambda stage, done, total: None))


def _prepared(
    content: _Stories | _Texts, length: int, out: str | Path | None, overwrite: bool, report: Progress
) -> Corpus:
    """The corpus with this content, made unless it is there."""
    settings = {"format": FORMAT, "length": length, **content.key()}
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    if out is None:
        tidy = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in content.name)[:40]
        folder = cache_folder() / "corpora" / f"{tidy}-{length}-{key[:12]}"
    else:
        folder = Path(out)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(folder):
        if _is_done(folder, key):
            return Corpus.open(folder)
        _check_place(folder, overwrite)
        work = _Work(folder, key, length)
        try:
            content.write(work, report)
        except BaseException as failure:
            work.leave(resumable=not isinstance(failure, UserError))
            raise
        return Corpus.open(folder)


def _check_place(folder: Path, overwrite: bool) -> None:
    """Refuse to write where something else is; `overwrite` is for another corpus, and for nothing but a corpus."""
    if folder.is_symlink():
        raise UserError(f"{folder} is a symbolic link: give the folder that it points to")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise UserError(f"{folder} exists and is not this corpus; choose another folder or allow overwriting it")
    files = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    foreign = sorted(name for name in files - OWN_FILES if not name.startswith(DRAFT))
    if not {"manifest.json", "train.bin"} <= files or foreign:
        what = f"it holds {foreign[0]}" if foreign else "it has no manifest"
        raise UserError(f"{folder} is not a corpus ({what}) and is not overwritten; choose another folder")


def _only_one(folder: Path) -> FileLock:
    """Two processes that want the same corpus take turns; the second finds it done."""
    locks = cache_folder() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    return FileLock(str(locks / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:20]}.lock"))


def _open_as_asked(folder: Path, tokenizer: str | None, vocabulary: int | None, length: int) -> Corpus:
    corpus = Corpus.open(folder)
    kind = corpus.manifest["tokenizer"]["kind"]
    for what, wanted, there in (
        ("sequences of length", length, corpus.length),
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
    if len(names) == 1 and first in CORPORA:
        source: Source = CORPORA[first](limit=limit)
        return source
    if len(names) == 1 and first.startswith("hf:"):
        return Hub(first.removeprefix("hf:"), dataset_config, dataset_split, text_field, heldout_share, limit)
    paths = [Path(name) for name in names]
    if len(paths) == 1 and not paths[0].exists() and paths[0].suffix == "" and len(paths[0].parts) == 1:
        raise unknown_name("corpus or file", first, CORPORA)
    files = find_files(paths)
    return Files(paths[0].resolve().stem, files, text_field=text_field, heldout_share=heldout_share, limit=limit)


def _is_done(folder: Path, key: str) -> bool:
    try:
        noted = read_json(folder / SETTINGS_FILE, dict[str, str])
    except (OSError, UserError):
        return False
    return bool(noted.get("key") == key and (folder / "manifest.json").is_file())


class Done(TypedDict):
    """How far a corpus is: documents read, tokens and bytes of text written."""

    documents: Count
    train: Count
    heldout: Count
    train_bytes: Count
    heldout_bytes: Count


class ProgressNote(TypedDict):
    """progress.json: what is being made, and how much of it is safely on the disk."""

    key: StrictStr
    done: Done


class _Work:
    """The unfinished corpus: two growing token streams and a note of how far they are."""

    def __init__(self, target: Path, key: str, length: int) -> None:
        self.target, self.key, self.length = target, key, length
        self.folder = target.with_name(target.name + ".partial")
        self.done: dict[str, Any] = {"documents": 0, "train": 0, "heldout": 0, "train_bytes": 0, "heldout_bytes": 0}
        self.tokenizer: Tokenizer | None = None
        self._streams: dict[str, BinaryIO] = {}
        note = self.folder / "progress.json"
        if os.path.lexists(self.folder) and not (self.folder.is_dir() and self._is_ours(note)):
            raise UserError(f"{self.folder} is in the way and not left by `prepare`: move it, or choose another folder")
        if note.is_file():
            noted = read_json(note, ProgressNote)
            if noted["key"] == key and (self.folder / "tokenizer.json").is_file():
                self.done = noted["done"]
                self.tokenizer = Tokenizer.load(self.folder)
                return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        write_json(note, {"key": key, "done": self.done})  # from now on the folder is known as ours

    def _is_ours(self, note: Path) -> bool:
        """Whether the folder is one that an earlier run left, at whatever moment it was stopped."""
        try:
            read_json(note, ProgressNote)
        except UserError:
            return not note.exists() and all(file.name.startswith(DRAFT) for file in self.folder.iterdir())
        return (
            not self.folder.is_symlink()
            and {file.name for file in self.folder.iterdir() if not file.name.startswith(DRAFT)} <= OWN_FILES
        )

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

    def encode(self, batch: Sequence[tuple[str, str, bool]], documents: int) -> None:
        """Append texts, each with its split and whether a document ends with it; now `documents` are done."""
        assert self.tokenizer is not None
        encoded = self.tokenizer.encode_batch([text for text, _, _ in batch])
        for (text, split, closes), ids in zip(batch, encoded, strict=True):
            self.append(split, np.array([*ids, self.tokenizer.end_id] if closes else ids, dtype=np.int64))
            self.done[f"{split}_bytes"] += len(text.encode())
        self.done["documents"] = documents

    @property
    def num_tokens(self) -> int:
        """Tokens of both splits so far."""
        return int(self.done["train"] + self.done["heldout"])

    def note(self) -> None:
        """Bring everything to disk and say so; a later run can go on from here."""
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
        write_json(self.folder / "progress.json", {"key": self.key, "done": self.done})

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
            # Too little was set aside to fill a sequence: the last whole sequence of the training text takes its place.
            train.flush()
            train.seek((total - 1) * length * size)
            last = train.read(length * size)
            heldout.truncate(0)
            heldout.write(last)
            self.done["heldout"], self.done["train"] = length, (total - 1) * length
            split_rule = "the last block of the training text (the rule left less than a block)"
        if self.done["train"] < length or self.done["heldout"] < length:
            raise UserError(
                f"too little text: {self.num_tokens} tokens do not fill two sequences of {length}; add text or use a "
                "smaller `length`"
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
            "sha256": {file: file_hash(self.folder / file) for file in hashed},
        }
        write_json(self.folder / SETTINGS_FILE, {"key": self.key, "fingerprint": fingerprint(manifest)})
        write_json(self.folder / "manifest.json", manifest)
        for path in (*self.folder.iterdir(), self.folder):
            sync(path)
        if self.target.exists():
            shutil.rmtree(self.target)
        self.folder.rename(self.target)
        (self.target / "progress.json").unlink()  # last: until then the folder is known as ours
        sync(self.target)
        sync(self.target.parent)


@dataclass(frozen=True)
class _Stories:
    """Stories written by their law."""

    seed: int
    num_train: int
    num_heldout: int
    name = "stories"

    def key(self) -> dict[str, Any]:
        """What decides the tokens."""
        return {"law": stories_law().sha256, "seed": self.seed, "blocks": [self.num_train, self.num_heldout]}

    def write(self, work: _Work, report: Progress) -> None:
        law, batch = stories_law(), 10_000
        needed, free = (self.num_train + self.num_heldout) * work.length * 2, shutil.disk_usage(work.folder).free
        if needed > free:
            raise UserError(
                f"{self.num_train:,} sequences of {work.length:,} tokens need {needed / 1e9:,.1f} GB on the disk, and "
                f" {free / 1e9:,.1f} GB are free: lower `blocks`"
            )
        work.start(stories_tokenizer())
        for split, num in (("train", self.num_train), ("heldout", self.num_heldout)):
            written = work.done[split] // work.length
            for first in range(0, num, batch):
                if first < written:
                    continue
                rng = np.random.default_rng(derive_seed(self.seed, "stories", split, first))
                work.append(split, law.sample(rng, min(batch, num - first), work.length))
                work.note()
                report("writing stories", work.num_tokens // work.length, self.num_train + self.num_heldout)
        work.finish(
            self.name,
            {"kind": "stories", "law": law.sha256, "seed": self.seed},
            "separate seeds",
            "every block starts at a story start; stories follow one another and the last is cut",
        )


@dataclass(frozen=True)
class _Texts:
    """Documents of a source under a tokenizer."""

    source: Source
    tokenizer: str
    vocabulary: int | None

    @property
    def name(self) -> str:
        return self.source.name

    def key(self) -> dict[str, Any]:
        """What decides the tokens."""
        kind = self.tokenizer if self.tokenizer in KINDS else Tokenizer.load(self.tokenizer).sha256
        return {"source": self.source.key(), "tokenizer": kind, "vocabulary": self.vocabulary}

    def write(self, work: _Work, report: Progress) -> None:
        source = self.source
        source.survey(report)
        if work.tokenizer is None:
            report("choosing the tokenizer", 0, None)
            default = DEFAULT_VOCABULARY.get(self.name, OTHER_VOCABULARY)
            work.start(build(self.tokenizer, _learning_texts(source), self.vocabulary, default))
        else:
            work.start(work.tokenizer)
        number, noted, waiting = 0, work.num_tokens, 0
        total = source.describe().get("documents")
        batch: list[tuple[str, str, bool]] = []
        for number, document in enumerate(source.documents(), start=1):
            if number <= work.done["documents"]:
                continue
            pieces = list(_pieces(document.text))
            batch += [(piece, document.split, index == len(pieces)) for index, piece in enumerate(pieces, start=1)]
            waiting += len(document.text)
            if waiting >= _BATCH:
                work.encode(batch, number)
                batch, waiting = [], 0
                report("packing", number, total)
                if work.num_tokens - noted >= _NOTE_EVERY:
                    work.note()
                    noted = work.num_tokens
        work.encode(batch, number)
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
