"""What a model was trained on, as its folder says it, and the one rule for which real text may judge it.

`corpus.json` in a checkpoint folder names the training corpus: its fingerprint, its tokenizer, the files it was made
of and how they were split. Real text contradicts it if its tokens are others, or if it is the same text split in
another way: then what one calls held out, the other has learned. Stories are written by a law, each part from seeds of
its own, so that no two splits of them can contradict each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import StrictStr
from typing_extensions import TypedDict

from convergeflow.data.corpus import Corpus
from convergeflow.data.tokenizer import Tokenizer
from convergeflow.files import read_json, write_json

FILE = "corpus.json"


class TrainedOn(TypedDict):
    """The corpus that a model was trained on."""

    name: StrictStr
    fingerprint: StrictStr
    tokenizer: StrictStr
    """Hash of the tokenizer."""
    texts: list[StrictStr]
    """Hashes of the files it was made of; empty for text that is written by a law."""
    split: StrictStr
    """How held-out text was chosen."""
    heldout: StrictStr
    """Hash of the held-out sequences."""


def facts_of(corpus: Corpus) -> TrainedOn:
    """A corpus as the models trained on it remember it."""
    manifest = corpus.manifest
    return {
        "name": corpus.name,
        "fingerprint": corpus.fingerprint,
        "tokenizer": manifest["tokenizer"]["sha256"],
        "texts": sorted(_hashes(manifest.get("source"))),
        "split": manifest["split"],
        "heldout": manifest["sha256"]["heldout.bin"],
    }


def _hashes(source: Any) -> set[str]:
    """Every file hash in a description of a source."""
    if isinstance(source, dict):
        own = {source["sha256"]} if isinstance(source.get("sha256"), str) else set()
        return own.union(*(_hashes(value) for value in source.values()))
    return set().union(*(_hashes(value) for value in source)) if isinstance(source, list) else set()


def remember(folder: Path, corpus: Corpus) -> None:
    """Write into a checkpoint folder what it was trained on."""
    write_json(folder / FILE, facts_of(corpus))


def recalled(folder: Path) -> TrainedOn | None:
    """What a checkpoint folder says it was trained on; None if it says nothing."""
    found: TrainedOn | None = read_json(folder / FILE, TrainedOn) if (folder / FILE).is_file() else None
    return found


def contradiction(corpus: Corpus, tokenizer: Tokenizer | None, trained_on: TrainedOn | None) -> str:
    """Why real text must not judge a model, in words; empty where nothing speaks against it."""
    here = facts_of(corpus)
    if tokenizer is not None and tokenizer.sha256 != here["tokenizer"]:
        return "its tokenizer is not the model's"
    if trained_on is None or here["heldout"] == trained_on["heldout"] or here["split"] == trained_on["split"]:
        return ""
    if set(here["texts"]) & set(trained_on["texts"]):
        return (
            f"it splits text that the model was trained on in another way ({here['split']}; the training set: "
            f"{trained_on['split']}), so that its held-out text may have been learned"
        )
    return ""
