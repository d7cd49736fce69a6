"""Flat token files: used where they lie, checked, refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from convergeflow.data.corpus import Corpus
from convergeflow.data.prepare import prepare
from convergeflow.data.tokenizer import byte_tokenizer
from convergeflow.errors import ConvergeFlowError, UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "openwebtext"
    place.mkdir()
    rng = np.random.default_rng(0)
    rng.integers(0, 257, 1003).astype("<u2").tofile(place / "train.bin")
    rng.integers(0, 257, 101).astype("<u2").tofile(place / "val.bin")
    return place


@pytest.mark.parametrize("as_files", [False, True])
def test_the_files_are_used_where_they_lie(folder: Path, as_files: bool) -> None:
    source = [folder / "train.bin", folder / "val.bin"] if as_files else folder
    corpus = prepare(source, tokenizer="byte", length=10)
    tokens = {name: np.fromfile(folder / f"{name}.bin", dtype="<u2") for name in ("train", "val")}
    np.testing.assert_array_equal(corpus.train, tokens["train"][:1000].reshape(100, 10))
    np.testing.assert_array_equal(corpus.heldout, tokens["val"][:100].reshape(10, 10))
    assert corpus.name == "openwebtext" and corpus.tokenizer.sha256 == byte_tokenizer().sha256
    for split, file in (("train", "train"), ("heldout", "val")):
        assert (corpus.folder / f"{split}.bin").samefile(folder / f"{file}.bin")
    assert corpus.manifest["splits"]["train"]["dropped_tokens"] == 3
    counts = np.bincount(tokens["train"][:1000], minlength=257)
    np.testing.assert_allclose(corpus.unigram, counts / 1000)
    corpus.verify()
    assert prepare(source, tokenizer="byte", length=10).fingerprint == corpus.fingerprint


def test_the_end_of_a_single_file_is_held_out(folder: Path) -> None:
    corpus = prepare(folder / "train.bin", tokenizer="byte", length=10, heldout_share=0.2)
    tokens = np.fromfile(folder / "train.bin", dtype="<u2")
    np.testing.assert_array_equal(corpus.train.ravel(), tokens[:800])
    np.testing.assert_array_equal(corpus.heldout.ravel(), tokens[800:1000])
    np.testing.assert_allclose(corpus.unigram, np.bincount(tokens[:800], minlength=257) / 800)


def test_a_file_that_changes_afterwards_is_noticed(folder: Path) -> None:
    corpus = prepare(folder, tokenizer="byte", length=10)
    with open(folder / "train.bin", "ab") as stream:
        stream.truncate(1000)
    with pytest.raises(ConvergeFlowError, match="1000 bytes instead of 2006"):
        Corpus.open(corpus.folder)


def test_ids_beyond_the_vocabulary(folder: Path) -> None:
    tokens = np.fromfile(folder / "train.bin", dtype="<u2")
    for place in (5, 1002):  # in a sequence, and in the rest that fills none
        wrong = tokens.copy()
        wrong[place] = 300
        wrong.tofile(folder / "train.bin")
        with pytest.raises(
            UserError, match=rf"train\.bin holds the id 300 \(at token {place}\), beyond the 257"
        ) as caught:
            prepare(folder, tokenizer="byte", length=10)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("size", "settings", "message"),
    [
        (2005, {"tokenizer": "byte"}, "2005 bytes, no whole uint16 tokens: it is empty or truncated"),
        (0, {"tokenizer": "byte"}, "0 bytes"),
        (2006, {"tokenizer": "bpe"}, "holds tokens already.*`gpt2`"),
        (2006, {"tokenizer": "byte", "length": 5000}, "too few tokens"),
        (2006, {"tokenizer": "byte", "vocabulary": 50257}, "has 257 tokens, not 50257"),
        (2006, {}, "convergeflow fetch gpt2-bpe"),
    ],
)
def test_mistakes(folder: Path, size: int, settings: dict[str, object], message: str, cache: Path) -> None:
    with open(folder / "train.bin", "ab") as stream:
        stream.truncate(size)
    with pytest.raises(UserError, match=message) as caught:
        prepare(folder, **settings)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_other_files_beside_them(folder: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        prepare([folder / "train.bin", folder / "missing.bin"])
    (folder / "a.txt").write_text("text")
    with pytest.raises(UserError, match="one or two"):
        prepare([folder / "train.bin", folder / "a.txt"])
