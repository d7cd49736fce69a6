"""Text in, corpus out: choose a tokenizer, pack the documents, write the sequences and the manifest.

A corpus is there or it is not (`packing.py`): a run that was stopped goes on where its last note to disk says, and a
run that was finished is not done again. Documents are written one after another with an end token behind each, and
the stream is cut into sequences.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from filelock import FileLock

from convergeflow.data import CORPORA
from convergeflow.data.corpus import FORMAT, SPLITS, Corpus
from convergeflow.data.encoders import Encoders, Passage
from convergeflow.data.flat import Flat, find_flat
from convergeflow.data.hub import Hub
from convergeflow.data.packing import OWN_FILES, Unfinished, is_done
from convergeflow.data.sources import START, Files, Place, Progress, Restartable, find_files, restartable
from convergeflow.data.stories import stories_law
from convergeflow.data.tokenizer import KINDS, LEARNED, Tokenizer, build, stories_tokenizer
from convergeflow.errors import UserError, unknown_name
from convergeflow.files import DRAFT, cache_folder
from convergeflow.randomness import derive_seed

DEFAULT_LENGTH = 64
DEFAULT_VOCABULARY = {"sotu": 1024}
OTHER_VOCABULARY = 4096

_PIECE = 1 << 22  # characters of a long document that are encoded at once
_BATCH = 1 << 20  # characters of short documents that are encoded at once
_NOTE_EVERY = 1 << 24  # tokens between two notes to disk
_LEARN_FROM = 20_000  # documents of a hub dataset that a tokenizer is learned from

LARGE = 1 << 28
"""Bytes of text that take longer to prepare than other processes can be kept waiting."""


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
    share: float = 1.0,
    workers: int | None = None,
    overwrite: bool = False,
    large: bool = True,
    progress: Progress | None = None,
) -> Corpus:
    """A corpus from a name (`stories`, `basic`), files or folders, flat token files, or the hub (`hf:NAME@REVISION`).

    A folder that is a prepared corpus is opened as it is. `out` defaults to a folder of the cache named by these
    settings; the second call with the same settings only opens it. `seed`, `blocks` and `heldout_blocks` are for the
    stories; `heldout_share` (of the text) and `documents` (how many at most) for texts; `text_field` for JSON lines and
    tables; `share` for files, of which so much is read from the beginning of each.
    `workers` processes encode, one per core if not given; they change nothing but the time. Without `large` a corpus
    that takes long to prepare is refused unless it is there.
    """
    _check_shares(heldout_share, share)
    _check_numbers(
        length=length,
        blocks=blocks,
        heldout_blocks=heldout_blocks,
        vocabulary=vocabulary,
        documents=documents,
        workers=workers,
    )
    names = [source] if isinstance(source, (str, Path)) else list(source)
    if not names:
        raise UserError("name a corpus or a file to prepare")
    if len(names) == 1 and (Path(names[0]) / "manifest.json").is_file():
        return _open_as_asked(Path(names[0]), tokenizer, vocabulary, length)
    if tokenizer is not None and tokenizer not in KINDS and not (Path(tokenizer) / "tokenizer.json").is_file():
        raise unknown_name("tokenizer", tokenizer, KINDS)
    content: _Content
    if names == ["stories"]:
        content = _Stories(seed, blocks, heldout_blocks)
        content.check(tokenizer, vocabulary)
    elif flat := find_flat([Path(name) for name in names]):
        content = Flat(*flat, tokenizer or "gpt2", heldout_share)
    else:
        texts = _texts(names, text_field, heldout_share, dataset_config, dataset_split, documents, share)
        content = _Texts(texts, tokenizer or "bpe", vocabulary, workers)
    folder, key = _folder_and_key(content, length, out)
    if not large and not is_done(folder, key):
        _refuse_if_large(content, names, tokenizer=tokenizer, vocabulary=vocabulary, length=length, out=out)
    corpus = _prepared(content, length, folder, key, overwrite, progress or (lambda stage, done, total: None))
    if vocabulary not in (None, corpus.vocabulary) and tokenizer is not None and tokenizer not in LEARNED:
        raise UserError(f"the {tokenizer} tokenizer has {corpus.vocabulary} tokens, not {vocabulary}; leave it out")
    return corpus


class _Content(Protocol):
    """What a corpus is made of."""

    @property
    def name(self) -> str: ...

    def key(self) -> dict[str, Any]:
        """What decides the tokens."""

    def size(self) -> int | None:
        """Bytes of text to encode; None where that is not known."""

    def write(self, work: Unfinished, report: Progress) -> None:
        """Make the corpus, from where an earlier run was stopped."""


def _check_numbers(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UserError(f"`{name}` must be at least 1, not {value}")


def _check_shares(heldout_share: float, share: float) -> None:
    if not 0 < heldout_share < 1:
        raise UserError(f"`heldout_share` must lie between 0 and 1, not {heldout_share}")
    if not 0 < share <= 1:
        raise UserError(f"`share` must be above 0 and at most 1, not {share}")


def _refuse_if_large(content: _Content, names: Sequence[str | Path], **options: Any) -> None:
    """Refuse what takes long to prepare, with the command that prepares it."""
    size = content.size()
    if size is None or size > LARGE:
        given = [f"--{name} {shlex.quote(str(value))}" for name, value in options.items() if value is not None]
        command = " ".join(["convergeflow prepare", *(shlex.quote(str(name)) for name in names), *given])
        raise UserError(f"the corpus is not prepared, and that takes longer than processes wait: first run {command}")


def _folder_and_key(content: _Content, length: int, out: str | Path | None) -> tuple[Path, str]:
    """Where the corpus with this content is or will be, and the name of everything that decides it."""
    settings = {"format": FORMAT, "length": length, **content.key()}
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    if out is not None:
        return Path(out), key
    tidy = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in content.name)[:40]
    return cache_folder() / "corpora" / f"{tidy}-{length}-{key[:12]}", key


def _prepared(content: _Content, length: int, folder: Path, key: str, overwrite: bool, report: Progress) -> Corpus:
    """The corpus with this content, made unless it is there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(folder):
        if is_done(folder, key):
            return Corpus.open(folder)
        _check_place(folder, overwrite)
        work = Unfinished(folder, key, length)
        try:
            if not work.finished:
                content.write(work, report)
        except BaseException as failure:
            work.leave(resumable=not isinstance(failure, UserError))
            raise
        work.take_place()
        return Corpus.open(folder)


def _check_place(folder: Path, overwrite: bool) -> None:
    """Refuse to write where something else is; `overwrite` is for another corpus, and for nothing but a corpus."""
    if folder.is_symlink():
        raise UserError(f"{folder} is a symbolic link: give the folder that it points to")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise UserError(f"{folder} exists and is not this corpus; choose another folder or add `overwrite`")
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
    share: float,
) -> Restartable:
    first = str(names[0])
    if len(names) == 1 and first in CORPORA:
        return restartable(CORPORA[first](limit=limit))
    if len(names) == 1 and first.startswith("hf:"):
        return Hub(first.removeprefix("hf:"), dataset_config, dataset_split, text_field, heldout_share, limit)
    paths = [Path(name) for name in names]
    if len(paths) == 1 and not paths[0].exists() and paths[0].suffix == "" and len(paths[0].parts) == 1:
        raise unknown_name("corpus or file", first, CORPORA)
    files, skipped = find_files(paths)
    how: dict[str, Any] = {"text_field": text_field, "heldout_share": heldout_share, "limit": limit, "share": share}
    return Files(paths[0].resolve().stem, files, skipped=skipped, **how)


@dataclass(frozen=True)
class _Stories:
    """Stories written by their law."""

    seed: int
    num_train: int
    num_heldout: int
    name = "stories"

    @staticmethod
    def check(tokenizer: str | None, vocabulary: int | None) -> None:
        """Their words are given: another tokenizer is refused."""
        words = len(stories_law().vocabulary)
        if tokenizer not in (None, "word") or vocabulary not in (None, words):
            raise UserError(f"the stories are made of words: leave `tokenizer` and `vocabulary` out (it has {words})")

    def key(self) -> dict[str, Any]:
        """What decides the tokens."""
        return {"law": stories_law().sha256, "seed": self.seed, "blocks": [self.num_train, self.num_heldout]}

    def size(self) -> int:
        """Bytes of text to read: none."""
        return 0

    def write(self, work: Unfinished, report: Progress) -> None:
        law, batch = stories_law(), 10_000
        needed, free = (self.num_train + self.num_heldout) * work.length * 2, shutil.disk_usage(work.folder).free
        if needed > free:
            raise UserError(
                f"{self.num_train:,} sequences of {work.length:,} tokens need {needed / 1e9:,.1f} GB on the disk, and "
                f"{free / 1e9:,.1f} GB are free: lower `blocks`"
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
            report,
        )


@dataclass(frozen=True)
class _Texts:
    """Documents of a source under a tokenizer."""

    source: Restartable
    tokenizer: str
    vocabulary: int | None
    workers: int | None = None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def _default(self) -> int:
        """Tokens of a learned tokenizer if nobody says how many."""
        return DEFAULT_VOCABULARY.get(self.name, OTHER_VOCABULARY)

    def key(self) -> dict[str, Any]:
        """What decides the tokens; a number that says what goes without saying changes nothing."""
        kind = self.tokenizer if self.tokenizer in KINDS else Tokenizer.load(self.tokenizer).sha256
        vocabulary = (self.vocabulary or self._default) if self.tokenizer in LEARNED else None
        return {"source": self.source.key(), "tokenizer": kind, "vocabulary": vocabulary}

    def size(self) -> int | None:
        """Bytes of text to read, or None."""
        return self.source.size()

    def write(self, work: Unfinished, report: Progress) -> None:
        source = self.source
        if work.tokenizer is None:
            facts = source.survey(report)
            report("choosing the tokenizer", 0, None)
            work.start(build(self.tokenizer, _learning_texts(source), self.vocabulary, self._default), facts)
        else:
            source.recall(work.facts, report)
            work.start(work.tokenizer)
        assert work.tokenizer is not None
        noted, total = work.num_tokens, source.size() or None
        with Encoders(work.folder, work.tokenizer, work.dtype, self.workers) as encoders:
            for packed, (place, text_bytes) in encoders.packed(_batches(source, work.place)):
                for split, tokens in packed.items():
                    work.append_bytes(split, tokens)
                work.reach(place, text_bytes)
                report("packing (bytes)", place.bytes, total)
                if work.num_tokens - noted >= _NOTE_EVERY:
                    work.note()
                    noted = work.num_tokens
        if work.place == START:
            raise UserError(f"the corpus is empty: {source.name} has no text")
        work.note()
        packing = "documents one after another, cut into blocks"
        work.finish(source.name, source.describe(), source.split_rule(), packing, report)


def _batches(source: Restartable, start: Place) -> Iterator[tuple[list[Passage], tuple[Place, dict[str, int]]]]:
    """Texts to encode at once, with the place behind them and the bytes of text of each split."""
    batch: list[Passage] = []
    text_bytes = dict.fromkeys(SPLITS, 0)
    waiting, place = 0, start
    for document in source.documents(start):
        pieces = list(_pieces(document.text))
        batch += [Passage(piece, document.split, index == len(pieces)) for index, piece in enumerate(pieces, start=1)]
        text_bytes[document.split] += len(document.text.encode())
        waiting += len(document.text)
        if document.after is not None:
            place = document.after
            if waiting >= _BATCH:
                yield batch, (place, text_bytes)
                batch, waiting, text_bytes = [], 0, dict.fromkeys(SPLITS, 0)
    if batch:
        yield batch, (place, text_bytes)


def _learning_texts(source: Restartable) -> Iterator[str]:
    """What a tokenizer may learn from: training documents only."""
    for number, document in enumerate(source.documents()):
        if isinstance(source, Hub) and number == _LEARN_FROM:
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
