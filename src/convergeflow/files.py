"""How this package writes files: whole or not at all, and on the disk before anything relies on them.

A file or folder is written beside its place under a hidden name, forced to the disk and renamed. A reader sees the old
one or the new one, never a part of it; a kill leaves at most a hidden draft.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

DRAFT = ".unfinished-"
"""How the names of drafts begin."""


def cache_folder() -> Path:
    """Where fetched data and prepared corpora live: $CONVERGEFLOW_CACHE, or the user's cache folder."""
    chosen = os.environ.get("CONVERGEFLOW_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("convergeflow", appauthor=False))


def sync(path: Path) -> None:
    """Force a file or a folder's list of names to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A draft to write a file to; it takes the place of `path` at the end, and goes if anything fails."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The ending stays: some libraries choose the format by it.
    draft = path.with_name(f"{DRAFT}{os.getpid()}-{path.name}")
    try:
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
    draft, old = path.with_name(DRAFT + path.name), path.with_name(f"{DRAFT}old-{path.name}")
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


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file in one step."""
    with replacing(path) as draft:
        draft.write_bytes(text.encode())  # line ends stay as they are


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON in one step; NaN and infinities, which JSON does not have, are refused."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
