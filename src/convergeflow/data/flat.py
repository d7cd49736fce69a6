"""Flat token files, `train.bin` and `val.bin`, as nanoGPT and the paper's published code write them: uint16, no header.

They are tokens already, so nothing is copied: the corpus folder holds links to them (copies where a disk has no links),
their counts and their hashes. The ids are checked against the tokenizer that is named, `gpt2` if none is.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convergeflow.data.packing import Unfinished, count_tokens, describe_corpus, token_type
from convergeflow.data.sources import Progress
from convergeflow.data.tokenizer import KINDS, LEARNED, Tokenizer, build
from convergeflow.errors import UserError

TOKENS = np.dtype("<u2")


def find_flat(paths: list[Path]) -> tuple[Path, Path | None] | None:
    """The training and the held-out file that are meant, or None if these are no flat token files."""
    if len(paths) == 1 and (paths[0] / "train.bin").is_file():
        held_out = paths[0] / "val.bin"
        return paths[0] / "train.bin", held_out if held_out.is_file() else None
    if not any(path.suffix == ".bin" for path in paths):
        return None
    for path in paths:
        if not path.is_file():
            raise UserError(f"no such file: {path}")
    if len(paths) > 2 or any(path.suffix != ".bin" for path in paths):
        raise UserError("flat token files are one or two: train.bin, and val.bin if there is one")
    return paths[0], paths[1] if len(paths) == 2 else None


@dataclass(frozen=True)
class Flat:
    """Two files of tokens, or one whose end is held out."""

    train: Path
    heldout: Path | None
    tokenizer: str
    heldout_share: float

    def __post_init__(self) -> None:
        if self.tokenizer in LEARNED:
            raise UserError(
                f"{self.train} holds tokens already, and a {self.tokenizer} tokenizer is learned from text: name the "
                "tokenizer it was made with (`gpt2`, or a folder with a tokenizer.json)"
            )

    @property
    def name(self) -> str:
        return self.train.resolve().parent.name

    def key(self) -> dict[str, Any]:
        """What decides the tokens."""
        files = [file for file in (self.train, self.heldout) if file is not None]
        stats = [(str(file.resolve()), file.stat()) for file in files]
        return {
            "flat": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats],
            "tokenizer": self.tokenizer if self.tokenizer in KINDS else Tokenizer.load(self.tokenizer).sha256,
            "heldout_share": self.heldout_share if self.heldout is None else None,
        }

    def size(self) -> int:
        """Bytes to read; nothing is encoded, so it is never much work."""
        return 0

    def write(self, work: Unfinished, report: Progress) -> None:
        tokenizer = build(self.tokenizer, iter(()), None, 0)
        if token_type(tokenizer.size) != TOKENS:
            raise UserError(f"flat token files hold ids up to 65535; the tokenizer has {tokenizer.size} tokens")
        tokenizer.save(work.folder)
        train, length = _mapped(self.train), work.length
        blocks = len(train) // length
        if self.heldout is None:
            spared = min(max(1, round(self.heldout_share * blocks)), blocks - 1)
            heldout, first, blocks = train, (blocks - spared) * length, blocks - spared
            rule = f"the last {self.heldout_share:.4g} of the sequences"
        else:
            heldout, first = _mapped(self.heldout), 0
            spared, rule = len(heldout) // length, "the held-out file"
        if blocks < 1 or spared < 1:
            raise UserError(
                f"too few tokens: {len(train)} and {len(heldout)} do not fill a sequence of {length} each; use a "
                "smaller `length`"
            )
        counts = _checked(train[: blocks * length], tokenizer, self.train, report)
        _checked(train[blocks * length :], tokenizer, self.train, report, before=blocks * length)
        if self.heldout is not None:
            _checked(heldout, tokenizer, self.heldout, report)
        np.save(work.folder / "unigram.npy", counts, allow_pickle=False)
        splits = {}
        for split, file, tokens, start, number in (
            ("train", self.train, train, 0, blocks),
            ("heldout", self.heldout or self.train, heldout, first, spared),
        ):
            _link(file.resolve(), work.folder / f"{split}.bin")
            rest = 0 if self.heldout is None and split == "train" else len(tokens) - start - number * length
            splits[split] = {"blocks": number, "tokens": number * length, "dropped_tokens": rest}
            splits[split] |= {"first_token": start, "file_bytes": tokens.nbytes}
        manifest = describe_corpus(
            self.name,
            tokenizer,
            source={"kind": "flat", "files": [file.name for file in (self.train, self.heldout) if file is not None]},
            length=length,
            packing="as the files have it, cut into blocks",
            separator="as the files have it",
            split=rule,
            splits=splits,
        )
        work.seal(manifest, report)


def _mapped(file: Path) -> NDArray[Any]:
    size = file.stat().st_size
    if size == 0 or size % TOKENS.itemsize:
        raise UserError(
            f"{file} has {size} bytes, no whole uint16 tokens: it is empty or truncated; copy it or make it again"
        )
    return np.memmap(file, dtype=TOKENS, mode="r")


def _checked(
    tokens: NDArray[Any], tokenizer: Tokenizer, file: Path, report: Progress, before: int = 0
) -> NDArray[np.int64]:
    """How often each token occurs; ids that the tokenizer does not have are refused."""
    counts = count_tokens(tokens, tokenizer.size, report)
    if len(counts) > tokenizer.size:
        place = next(
            first + int(np.argmax(tokens[first : first + (1 << 24)] >= tokenizer.size))
            for first in range(0, len(tokens), 1 << 24)
            if (tokens[first : first + (1 << 24)] >= tokenizer.size).any()
        )
        raise UserError(
            f"{file} holds the id {tokens[place]} (at token {before + place}), beyond the {tokenizer.size} of the "
            f"{tokenizer.kind} tokenizer: give the `tokenizer` it was made with"
        )
    return counts


def _link(file: Path, place: Path) -> None:
    try:
        place.symlink_to(file)
    except OSError:
        shutil.copyfile(file, place)
