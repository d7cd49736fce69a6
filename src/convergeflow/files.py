"""How this package writes and reads files: whole or not at all, by one writer at a time, and never on trust.

A file or folder is written beside its place under a hidden name, forced to the disk and renamed. A reader sees the old
one or the new one, never a part of it; a kill leaves at most a hidden draft. Only plain files are replaced: a device, a
pipe, a folder or a symbolic link in the way is refused. JSON and YAML that may come from anybody go through `read_json`
and `read_yaml`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs

from convergeflow.errors import UserError

DRAFT = ".unfinished-"
"""How the names of drafts begin."""
LOCK = ".lock"
"""How the names of locks end."""
MOST_JSON_BYTES = 1 << 28
"""A JSON file that is larger is not one of ours."""
MOST_YAML_BYTES = 1 << 20
"""What people write in YAML is a page of text."""


def cache_folder() -> Path:
    """Where fetched data and prepared corpora live: $CONVERGEFLOW_CACHE, or the user's cache folder."""
    chosen = os.environ.get("CONVERGEFLOW_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("convergeflow", appauthor=False))


# --- writing ---


def sync(path: Path) -> None:
    """Force a file or a folder's list of names to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(path: str | Path) -> None:
    """Refuse to write where something is that is no plain file: it would be replaced, or written through."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:  # nothing there, or a folder that cannot be read: the writer will say so
        return
    if stat.S_ISDIR(mode):
        raise UserError(f"{path} is a folder: give the name of a file")
    if stat.S_ISLNK(mode):
        raise UserError(f"{path} is a symbolic link: give the file that it points to")
    if not stat.S_ISREG(mode):
        raise UserError(f"{path} is a device or a pipe, not a file: give the name of a file")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A draft to write a file to; it takes the place of `path` at the end, and goes if anything fails."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_writable(path)
    # The ending stays: some libraries choose the format by it. Nobody can guess the name and put a link there.
    draft = path.with_name(f"{DRAFT}{secrets.token_hex(4)}-{path.name[-100:]}")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        if path.exists():
            draft.chmod(stat.S_IMODE(path.stat().st_mode))
        yield draft
        sync(draft)
        os.replace(draft, path)
        sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: str | Path) -> Iterator[Path]:
    """A draft folder to fill; it takes the place of `path` at the end, and goes if anything fails."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link: give the folder that it points to")
    draft, old = path.with_name(DRAFT + path.name), path.with_name(f"{DRAFT}old-{path.name}")
    if old.is_dir() and not path.exists():  # killed between the two renames below
        old.rename(path)
    shutil.rmtree(draft, ignore_errors=True)  # what a crash left
    draft.mkdir()
    try:
        yield draft
        for found in (*draft.rglob("*"), draft):
            sync(found)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        draft.rename(path)
        shutil.rmtree(old, ignore_errors=True)
        sync(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file in one step."""
    with replacing(path) as draft:
        draft.write_bytes(text.encode(errors="surrogateescape"))  # line ends stay as they are


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON in one step; NaN and infinities, which JSON does not have, are refused."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def open_to_append(path: Path) -> int:
    """A descriptor that appends to a plain file, made if it is not there; never through a symbolic link."""
    check_writable(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, 0o666)


@contextmanager
def only_writer(place: Path, what: str) -> Iterator[None]:
    """Keep every other process away from a folder or file while it is written; `what` names it in the refusal."""
    from filelock import FileLock, Timeout

    name = place / LOCK if place.is_dir() else place.with_name(f".{place.name[-100:]}{LOCK}")
    lock = FileLock(str(name))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"another process is writing {what}: wait for it, stop it, or choose another `out`") from None
    try:
        yield
    finally:
        # While it is still held: who waits for it sees that the name is gone and tries again.
        name.unlink(missing_ok=True)
        lock.release()


# --- reading ---


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: str | Path, kind: Any = None, *, fix: str = "", finite: bool = True) -> Any:
    """The JSON value of a file that anybody may have written, checked against `kind`, a type that pydantic knows.

    What is torn, too large, nested too deeply, of another type or, if it must be, not finite, is refused in one line
    that ends with `fix`.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist or is no plain file{fix and '; ' + fix}")
    if path.stat().st_size > MOST_JSON_BYTES:
        raise UserError(f"{path} has {path.stat().st_size} bytes, too many for a JSON file of this kind")
    try:
        return parse_json(path.read_bytes(), kind, finite=finite)
    except UserError as wrong:
        raise UserError(f"{path} {wrong}{fix and '; ' + fix}") from None


def parse_json(text: str | bytes, kind: Any = None, *, finite: bool = True) -> Any:
    """A JSON text as a value of a kind; the refusal is the end of a sentence about the text."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant if finite else None)
    except RecursionError:
        raise UserError("is nested too deeply") from None
    except ValueError as wrong:  # also what is not UTF-8, and numbers with too many digits
        raise UserError(f"is not valid JSON ({' '.join(str(wrong).split())[:120]})") from None
    if kind is not None:
        check_type(value, kind)
    return value


def check_type(value: Any, kind: Any) -> Any:
    """The value as pydantic makes it of a `kind`; the refusal is the end of a sentence about the value."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        finding = error.errors()[0]
        where = ".".join(map(str, finding["loc"]))
        said = str(finding["ctx"]["error"]) if finding["type"] == "value_error" else finding["msg"]
        said = said.replace("Input should be", "must be")[:1].lower() + said.replace("Input should be", "must be")[1:]
        raise UserError(f"holds a wrong value: {where + ': ' if where else ''}{' '.join(said.split())[:200]}") from None
    except RecursionError:
        raise UserError("is nested too deeply") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def read_yaml(path: str | Path) -> Any:
    """The YAML value of a file that anybody may have written; what cannot be read is refused in one line."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist or is no plain file")
    if path.stat().st_size > MOST_YAML_BYTES:
        raise UserError(
            f"{path} has {path.stat().st_size:,} bytes: a file of this kind has {MOST_YAML_BYTES:,} at most"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text") from None
    try:
        return parse_yaml(text)
    except UserError as wrong:
        raise UserError(f"{path} is not valid YAML: {wrong}") from None


def parse_yaml(text: str) -> Any:
    """A YAML text as a plain value, without references."""
    import yaml

    try:
        return yaml.load(text, Loader=_without_references())
    except RecursionError:
        raise UserError("it is nested too deeply") from None
    # The library lets errors of dates, numbers and characters through as they are.
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise UserError(" ".join(str(error).split())[:200]) from None


@cache
def _without_references() -> Any:
    """A loader of plain values; ten lines of references can stand for more text than any memory holds."""
    import yaml

    class Plain(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("references (*name) are not taken: write the value out")
            return super().compose_node(parent, index)

    return Plain
