"""The unfinished corpus: two growing streams of tokens, and a note on the disk of how far they are.

The work is done in a folder beside the target (`NAME.partial`) and renamed when it is whole. Whatever moment a run is
killed at, the next one cuts the streams back to the last note and goes on from there, and the end is the same bytes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import StrictStr
from typing_extensions import TypedDict

from convergeflow.data.corpus import FORMAT, SETTINGS_FILE, SPLITS, Count, fingerprint
from convergeflow.data.sources import START, Place, Progress
from convergeflow.data.tokenizer import Tokenizer
from convergeflow.errors import UserError
from convergeflow.files import DRAFT, file_hash, read_json, sync, write_json

OWN_FILES = {
    *(f"{split}.bin" for split in SPLITS),
    *("manifest.json", SETTINGS_FILE, "unigram.npy", "tokenizer.json", "tokenizer_config.json", "progress.json"),
}
"""What a corpus folder holds, and nothing else."""
_PIECE = 1 << 24  # tokens that are counted at once


def token_type(size: int) -> np.dtype[Any]:
    """The numbers in which tokens of a vocabulary are written."""
    return np.dtype("<u2" if size <= 1 << 16 else "<u4")


def is_done(folder: Path, key: str) -> bool:
    """Whether a folder holds the whole corpus of these settings."""
    try:
        noted = read_json(folder / SETTINGS_FILE, dict[str, str])
    except (OSError, UserError):
        return False
    return bool(noted.get("key") == key and (folder / "manifest.json").is_file())


class Done(TypedDict):
    """How far a corpus is: tokens and bytes of text written, and where in the source to go on."""

    train: Count
    heldout: Count
    train_bytes: Count
    heldout_bytes: Count
    place: NotRequired[list[Any]]
    facts: NotRequired[dict[str, Any]]
    rule: NotRequired[StrictStr]


class ProgressNote(TypedDict):
    """progress.json: what is being made, and how much of it is safely on the disk."""

    key: StrictStr
    done: Done


class Unfinished:
    """Appends tokens, notes how far it is, and makes a corpus of it in the end."""

    def __init__(self, target: Path, key: str, length: int) -> None:
        self.target, self.key, self.length = target, key, length
        self.folder = target.with_name(target.name + ".partial")
        self.done: dict[str, Any] = dict.fromkeys(SPLITS, 0) | {f"{split}_bytes": 0 for split in SPLITS}
        self.tokenizer: Tokenizer | None = None
        self._streams: dict[str, BinaryIO] = {}
        if is_done(self.folder, key):
            return  # killed before its last step
        note = self.folder / "progress.json"
        if os.path.lexists(self.folder) and not self._is_ours(note):
            raise UserError(f"{self.folder} is in the way and not left by `prepare`: move it, or choose another folder")
        noted = read_json(note, ProgressNote) if note.is_file() else {}
        if noted.get("key") == key and "facts" in noted["done"]:  # before that nothing was begun
            self.done = noted["done"]
            self.tokenizer = Tokenizer.load(self.folder)
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        write_json(note, {"key": key, "done": self.done})  # from now on the folder is known as ours

    def _is_ours(self, note: Path) -> bool:
        """Whether the folder is one that an earlier run left, at whatever moment it was stopped."""
        if self.folder.is_symlink() or not self.folder.is_dir():
            return False
        names = {file.name for file in self.folder.iterdir() if not file.name.startswith(DRAFT)}
        try:
            read_json(note, ProgressNote)
        except UserError:
            return not names or (not note.exists() and SETTINGS_FILE in names and names <= OWN_FILES)
        return names <= OWN_FILES

    @property
    def finished(self) -> bool:
        """Whether everything is written and the folder only needs its name."""
        return is_done(self.folder, self.key)

    @property
    def dtype(self) -> np.dtype[Any]:
        assert self.tokenizer is not None
        return token_type(self.tokenizer.size)

    @property
    def place(self) -> Place:
        """Where in the source to go on."""
        return Place(*self.done["place"]) if "place" in self.done else START

    @property
    def facts(self) -> dict[str, Any]:
        """What the source found when it was looked at."""
        return dict(self.done.get("facts", {}))

    @property
    def num_tokens(self) -> int:
        """Tokens of both splits so far."""
        return int(self.done["train"] + self.done["heldout"])

    def start(self, tokenizer: Tokenizer, facts: dict[str, Any] | None = None) -> None:
        """Open the streams; what an earlier run wrote after its last note is cut off."""
        if self.tokenizer is None:
            tokenizer.save(self.folder)
            self.tokenizer = tokenizer
            self.done["facts"] = facts or {}
        for split in SPLITS:
            stream = open(self.folder / f"{split}.bin", "a+b")  # noqa: SIM115 (closed by `finish` or `leave`)
            stream.truncate(self.done[split] * self.dtype.itemsize)
            self._streams[split] = stream
        self.note()

    def append(self, split: str, ids: NDArray[np.int64]) -> None:
        self.append_bytes(split, ids.astype(self.dtype).tobytes())

    def append_bytes(self, split: str, tokens: bytes) -> None:
        """Tokens as they lie on the disk."""
        self._streams[split].write(tokens)
        self.done[split] += len(tokens) // self.dtype.itemsize

    def reach(self, place: Place, text_bytes: Mapping[str, int]) -> None:
        """All documents up to a place are appended; they have this much more text."""
        self.done["place"] = list(place)
        for split, number in text_bytes.items():
            self.done[f"{split}_bytes"] += number

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
        if not resumable or not (self.finished or (self.folder / "progress.json").is_file()):
            shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self, name: str, source: dict[str, Any], split_rule: str, packing: str, report: Progress) -> None:
        """Cut the streams into sequences, and write counts, hashes and the manifest."""
        assert self.tokenizer is not None
        self._hold_out_something()
        splits: dict[str, dict[str, int]] = {}
        for split, stream in self._streams.items():
            blocks = self.done[split] // self.length
            stream.truncate(blocks * self.length * self.dtype.itemsize)
            splits[split] = {
                "blocks": blocks,
                "tokens": blocks * self.length,
                "dropped_tokens": self.done[split] - blocks * self.length,
            }
            if self.done[f"{split}_bytes"]:
                splits[split]["text_bytes"] = self.done[f"{split}_bytes"]
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
        tokens = np.memmap(self.folder / "train.bin", dtype=self.dtype, mode="r")
        np.save(self.folder / "unigram.npy", count_tokens(tokens, self.tokenizer.size, report), allow_pickle=False)
        manifest = describe_corpus(
            name,
            self.tokenizer,
            source=source,
            length=self.length,
            packing=packing,
            separator=f"the end token (id {self.tokenizer.end_id}) behind every document",
            split=self.done.get("rule", split_rule),
            splits=splits,
        )
        self.seal(manifest, report)

    def _hold_out_something(self) -> None:
        """If too little was set aside to fill a sequence, the last ones of the training text do.

        Two where they can be spared: to hold samples against real text takes one to score and one to count.
        """
        length, size, total = self.length, self.dtype.itemsize, self.done["train"] // self.length
        wanted = 2 if total >= 4 else 1
        if self.done["heldout"] < wanted * length and total >= 2:
            train, heldout = self._streams["train"], self._streams["heldout"]
            train.flush()
            train.seek((total - wanted) * length * size)
            last = train.read(wanted * length * size)
            heldout.truncate(0)
            heldout.write(last)
            what = "block" if wanted == 1 else f"{wanted} blocks"
            self.done |= {
                "heldout": wanted * length,
                "train": (total - wanted) * length,
                "rule": f"the last {what} of the training text (the rule left less than that)",
            }
            self.note()
        if self.done["train"] < length or self.done["heldout"] < length:
            raise UserError(
                f"too little text: {self.done['train']} tokens to train on and {self.done['heldout']} held out do not "
                f"fill a sequence of {length} each; add text or use a smaller `length`"
            )

    def seal(self, manifest: dict[str, Any], report: Progress) -> None:
        """Add the hashes of all files and the manifest itself."""
        hashes = {}
        for file in ("train.bin", "heldout.bin", "unigram.npy", "tokenizer.json"):
            report(f"hashing {file}", 0, None)
            hashes[file] = file_hash(self.folder / file)
        # `settings.json` makes the folder a corpus that is done, so it comes last.
        whole = {**manifest, "sha256": hashes}
        write_json(self.folder / "manifest.json", whole)
        for path in self.folder.iterdir():
            sync(path)
        write_json(self.folder / SETTINGS_FILE, {"key": self.key, "fingerprint": fingerprint(whole)})

    def take_place(self) -> None:
        """Become the target."""
        for leftover in (self.folder / "progress.json", *self.folder.glob(f"{DRAFT}*")):
            leftover.unlink(missing_ok=True)
        if self.target.exists():
            shutil.rmtree(self.target)
        self.folder.rename(self.target)
        sync(self.target.parent)


def count_tokens(tokens: NDArray[Any], vocabulary: int, report: Progress) -> NDArray[np.int64]:
    """How often each token occurs, [vocabulary]; longer if there are ids beyond it."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for first in range(0, len(tokens), _PIECE):
        piece = np.bincount(tokens[first : first + _PIECE], minlength=len(counts))
        piece[: len(counts)] += counts
        counts = piece
        report("counting tokens", min(first + _PIECE, len(tokens)), len(tokens))
    return counts


def describe_corpus(name: str, tokenizer: Tokenizer, **facts: Any) -> dict[str, Any]:
    """A manifest without the hashes."""
    return {
        "format": FORMAT,
        "name": name,
        "tokenizer": {
            "kind": tokenizer.kind,
            "size": tokenizer.size,
            "sha256": tokenizer.sha256,
            "end_id": tokenizer.end_id,
        },
        "dtype": f"uint{8 * token_type(tokenizer.size).itemsize}",
        **facts,
    }
