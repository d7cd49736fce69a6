"""Checkpoint folders that are either whole or refused.

A folder is written under a temporary name, every file is forced to the disk, a manifest with each file's SHA-256 is
added, and only then is the folder renamed: a crash at any moment leaves the older checkpoints untouched. Loading checks
the hashes; a torn or changed folder is named in a warning and the one before it is used. No pickle anywhere.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field, StrictInt, StrictStr
from typing_extensions import TypedDict

from convergeflow import files
from convergeflow.errors import ConvergeFlowError, UserError

MANIFEST = "manifest.json"
FOLDER = "checkpoints"
MODEL_FOLDER = "model"
"""Where a finished run puts its averaged model."""
PREFIX = "step-"


class BrokenCheckpoint(ConvergeFlowError):
    """A folder whose files do not match its manifest."""


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class ManifestEntry(TypedDict):
    """A file as it was written."""

    bytes: StrictInt
    sha256: StrictStr


class CheckpointManifest(TypedDict):
    """The files of a folder; `sha256` is of all the rest."""

    files: dict[str, ManifestEntry]
    sha256: StrictStr


class TrainerState(TypedDict):
    """Where a run was, besides its tensors."""

    step: Annotated[StrictInt, Field(ge=0)]
    stage: StrictStr
    journal_bytes: Annotated[StrictInt, Field(ge=0)]
    journal_sha256: NotRequired[StrictStr]
    world: StrictInt
    corpus: StrictStr
    evaluation: dict[str, float | None] | None


def _own_hash(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def seal(folder: Path) -> None:
    """Write the manifest of a folder."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    listed = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": files.file_hash(path)} for path in found
    }
    manifest: dict[str, Any] = {"format": 1, "files": listed}
    write_json(folder / MANIFEST, {**manifest, "sha256": _own_hash(manifest)})


def verify(folder: Path) -> None:
    """Refuse a folder that is not exactly what was written."""
    try:
        manifest = files.read_json(folder / MANIFEST, CheckpointManifest)
        listed, own = manifest["files"], manifest["sha256"]
    except (OSError, UserError):
        raise BrokenCheckpoint(f"{folder} has no readable {MANIFEST}") from None
    if _own_hash(manifest) != own:
        raise BrokenCheckpoint(f"{folder}: {MANIFEST} was changed")
    for name, entry in listed.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise BrokenCheckpoint(f"{folder}: {name} lies outside the folder")
        if not path.is_file():
            raise BrokenCheckpoint(f"{folder}: {name} is missing")
        if path.stat().st_size != entry["bytes"]:
            raise BrokenCheckpoint(f"{folder}: {name} has {path.stat().st_size} bytes instead of {entry['bytes']}")
        if files.file_hash(path) != entry["sha256"]:
            raise BrokenCheckpoint(f"{folder}: {name} was changed (its SHA-256 differs)")


def write_folder(target: Path, write: Callable[[Path], None]) -> Path:
    """Make `target` all at once: `write` fills a folder under a temporary name, which is then sealed and renamed."""
    try:
        with files.replacing_folder(target) as draft:
            write(draft)
            seal(draft)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else " ".join(str(error).split())
        fix = "free some space and go on with `resume`" if full else "mend it and go on with `resume`"
        raise ConvergeFlowError(f"cannot write {target}: {reason}; older checkpoints are whole: {fix}") from error
    return target


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))


def present(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first, whole or not."""
    return sorted(path for path in (run / FOLDER).glob(PREFIX + "*") if path.name.removeprefix(PREFIX).isdigit())


def save_step(run: Path, step: int, write: Callable[[Path], None], *, keep: int, keep_every: int = 0) -> Path:
    """Write the checkpoint of a step and remove the oldest ones beyond `keep`, but for every `keep_every`-th step's."""
    target = run / FOLDER / f"{PREFIX}{step:08d}"
    write_folder(target, write)
    # Later folders can only be broken ones that a resumed run has passed over: they would confuse the next search.
    for later in [path for path in present(run) if step_of(path) > step]:
        shutil.rmtree(later, ignore_errors=True)
    remove_older(run, step, keep=keep, keep_every=keep_every)
    return target


def remove_older(run: Path, step: int, *, keep: int, keep_every: int | None = None) -> None:
    """Remove all checkpoints up to a step but the newest `keep` and those of every `keep_every` steps.

    A kill may have come in before that.
    """
    for old in [path for path in present(run) if step_of(path) <= step][:-keep]:
        if not keep_every or step_of(old) % keep_every:
            shutil.rmtree(old, ignore_errors=True)


def newest_whole(run: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose hashes are right; every broken one is named through `warn`."""
    for folder in reversed(present(run)):
        try:
            verify(folder)
        except BrokenCheckpoint as broken:
            warn(f"checkpoint refused: {broken}")
            continue
        return folder
    return None
