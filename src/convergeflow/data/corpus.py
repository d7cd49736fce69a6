"""A prepared corpus on disk: sequences of tokens in two memory-mapped files, a tokenizer, and a manifest.

    manifest.json            where it came from, how it was cut, counts, hashes of all files
    train.bin, heldout.bin   little-endian uint16 or uint32, [sequences, length]; links to flat token files (`flat.py`)
    unigram.npy              how often each token occurs in the training sequences
    tokenizer.json, tokenizer_config.json

The fingerprint is a hash of the manifest, and the manifest holds the hashes of the data: equal fingerprints mean equal
sequences.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import Field, StrictInt, StrictStr
from typing_extensions import TypedDict

from convergeflow.data.tokenizer import Tokenizer
from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.files import check_type, file_hash, read_json

FORMAT = 1
SPLITS = ("train", "heldout")
SETTINGS_FILE = "settings.json"
"""What was asked for, and the fingerprint that the corpus had when it was made."""


Count = Annotated[StrictInt, Field(ge=0, lt=1 << 48)]


class Split(TypedDict):
    """One of the two files of sequences."""

    blocks: Count


class TokenizerFacts(TypedDict):
    """Which tokenizer made the ids."""

    kind: StrictStr
    size: Annotated[StrictInt, Field(ge=1, lt=1 << 32)]
    sha256: StrictStr
    end_id: Count


class Splits(TypedDict):
    train: Split
    heldout: Split


class PassedOver(TypedDict):
    """A file that was not read, and why."""

    name: StrictStr
    reason: StrictStr


class SourceFacts(TypedDict):
    """What is read of the description of a source; it holds more."""

    files: NotRequired[list[Any]]
    skipped: NotRequired[list[PassedOver]]


class CorpusManifest(TypedDict):
    """What is read of a manifest; it holds more."""

    format: StrictInt
    name: StrictStr
    length: Annotated[StrictInt, Field(ge=1, lt=1 << 24)]
    dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerFacts
    splits: Splits
    split: StrictStr
    sha256: dict[Literal["train.bin", "heldout.bin", "unigram.npy", "tokenizer.json"], StrictStr]
    source: NotRequired[SourceFacts]


class _OtherFormat(UserError):
    pass


class Corpus:
    """Read access to a prepared corpus; make one with `prepare`."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.name: str = manifest["name"]
        self.length: int = manifest["length"]
        self.vocabulary: int = manifest["tokenizer"]["size"]
        self.fingerprint: str = fingerprint(manifest)

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Open the folder; a folder that is no corpus, or is torn, is refused by name."""
        folder = Path(folder)
        path = folder / "manifest.json"
        if not path.is_file():
            raise UserError(
                f"{folder} is not a prepared corpus (no manifest.json); make one with: convergeflow prepare"
            )
        try:
            manifest = read_json(path)
            if manifest["format"] != FORMAT:
                raise _OtherFormat(
                    f"{folder} has format {manifest['format']}, this version reads {FORMAT}; prepare it again"
                )
            check_type(manifest, CorpusManifest)
            corpus = cls(folder, manifest)
            for split in SPLITS:
                files = (f"{split}.bin", "tokenizer.json", "unigram.npy")
                if missing := [name for name in files if not (folder / name).is_file()]:
                    raise FileNotFoundError(f"{missing[0]} is not there")
                facts = manifest["splits"][split]
                expected = facts.get("file_bytes", facts["blocks"] * corpus.length * corpus.dtype.itemsize)
                actual = (folder / f"{split}.bin").stat().st_size
                if actual != expected:
                    raise ConvergeFlowError(
                        f"{folder / f'{split}.bin'} has {actual} bytes instead of {expected}; prepare the corpus again"
                    )
        except (ValueError, KeyError, TypeError, FileNotFoundError) as failure:
            if isinstance(failure, _OtherFormat):
                raise
            raise ConvergeFlowError(f"{folder} is damaged ({failure}); prepare the corpus again") from failure
        return corpus

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.manifest["dtype"]).newbyteorder("<")

    @cached_property
    def train(self) -> NDArray[Any]:
        """Training sequences, [sequences, length], memory-mapped."""
        return self._sequences("train")

    @cached_property
    def heldout(self) -> NDArray[Any]:
        """Held-out sequences, [sequences, length], memory-mapped."""
        return self._sequences("heldout")

    @cached_property
    def windows(self) -> NDArray[Any]:
        """Every stretch of `length` training tokens, wherever it begins, [tokens - length + 1, length]; a view."""
        return sliding_window_view(self.train.reshape(-1), self.length)

    def _sequences(self, split: str) -> NDArray[Any]:
        facts = self.manifest["splits"][split]
        if facts["blocks"] == 0:
            return np.zeros((0, self.length), dtype=self.dtype)
        first = facts.get("first_token", 0) * self.dtype.itemsize
        shape = (facts["blocks"], self.length)
        return np.memmap(self.folder / f"{split}.bin", dtype=self.dtype, mode="r", offset=first, shape=shape)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        found, said = Tokenizer.load(self.folder), self.manifest["tokenizer"]
        if (found.sha256, found.end_id) != (said["sha256"], said["end_id"]):
            raise ConvergeFlowError(f"the tokenizer in {self.folder} was changed; prepare the corpus again")
        return found

    @cached_property
    def unigram(self) -> NDArray[np.float64]:
        """Share of each token in the training sequences, [vocabulary]; sums to one."""
        try:
            counts = np.load(self.folder / "unigram.npy", mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError, OverflowError, SyntaxError):
            counts = np.zeros(0)
        if counts.shape != (self.vocabulary,) or counts.dtype.kind not in "iuf" or not counts.sum() > 0:
            raise ConvergeFlowError(f"{self.folder / 'unigram.npy'} is damaged; prepare the corpus again")
        return np.asarray(counts / counts.sum(), dtype=np.float64)

    @property
    def unigram_entropy(self) -> float:
        """Entropy of the training tokens' unigram distribution in nats."""
        shares = self.unigram[self.unigram > 0]
        return float(-(shares * np.log(shares)).sum())

    def verify(self, largest: int | None = None) -> None:
        """Compare every file, or those that are not too large, with its hash in the manifest, and the manifest too."""
        noted = self.folder / SETTINGS_FILE
        made = read_json(noted, dict[str, str]).get("fingerprint") if noted.is_file() else None
        if made not in (None, self.fingerprint):
            raise ConvergeFlowError(f"{self.folder / 'manifest.json'} was changed; prepare the corpus again")
        for name, expected in self.manifest["sha256"].items():
            if largest is not None and (self.folder / name).stat().st_size > largest:
                continue
            if not (self.folder / name).is_file() or file_hash(self.folder / name) != expected:
                raise ConvergeFlowError(f"{self.folder / name} was changed; prepare the corpus again")

    def __repr__(self) -> str:
        train, heldout = (self.manifest["splits"][split]["blocks"] for split in SPLITS)
        return f"Corpus({self.name!r}, {train} + {heldout} sequences of {self.length}, vocabulary {self.vocabulary})"


def fingerprint(manifest: dict[str, Any]) -> str:
    """A short hash of the whole manifest."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
