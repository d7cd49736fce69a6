"""Opening a corpus: what is whole is read, what is torn or changed is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from convergeflow.data.corpus import Corpus
from convergeflow.data.prepare import prepare
from convergeflow.errors import ConvergeFlowError, UserError


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return prepare("stories", tmp_path / "corpus", length=16, blocks=30, heldout_blocks=5)


def test_open_reads_what_was_written(corpus: Corpus) -> None:
    again = Corpus.open(corpus.folder)
    np.testing.assert_array_equal(again.train, corpus.train)
    assert isinstance(again.train, np.memmap) and not again.train.flags.writeable
    assert again.fingerprint == corpus.fingerprint
    assert (again.length, again.name) == (16, "stories")
    shares = np.bincount(np.asarray(corpus.train).ravel()) / corpus.train.size
    assert again.unigram_entropy == pytest.approx(float(-sum(p * np.log(p) for p in shares if p > 0)))


def test_manifest_says_where_it_came_from(corpus: Corpus) -> None:
    manifest = corpus.manifest
    assert manifest["source"]["kind"] == "stories"
    assert manifest["splits"]["train"] == {"blocks": 30, "tokens": 480, "dropped_tokens": 0}
    assert manifest["tokenizer"] == {
        "kind": "word",
        "size": corpus.vocabulary,
        "sha256": corpus.tokenizer.sha256,
        "end_id": 0,
    }
    assert {"packing", "separator", "split", "sha256", "dtype"} <= set(manifest)


def test_a_torn_file_is_refused(corpus: Corpus) -> None:
    path = corpus.folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ConvergeFlowError, match=r"train\.bin has 958 bytes instead of 960"):
        Corpus.open(corpus.folder)
    path.unlink()
    with pytest.raises(ConvergeFlowError, match="damaged"):
        Corpus.open(corpus.folder)


def test_a_flipped_byte_is_found_by_verify(corpus: Corpus) -> None:
    corpus.verify()
    path = corpus.folder / "heldout.bin"
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConvergeFlowError, match=r"heldout\.bin was changed"):
        Corpus.open(corpus.folder).verify()


def test_no_corpus_another_format_and_a_broken_manifest(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a prepared corpus"):
        Corpus.open(tmp_path / "nowhere")
    path = corpus.folder / "manifest.json"
    path.write_text(json.dumps({**corpus.manifest, "format": 99}))
    with pytest.raises(UserError, match="format 99"):
        Corpus.open(corpus.folder)
    path.write_text("{")
    with pytest.raises(ConvergeFlowError, match="damaged"):
        Corpus.open(corpus.folder)


def test_prepare_opens_a_corpus_folder_as_it_is(corpus: Corpus) -> None:
    assert prepare(corpus.folder, length=16).fingerprint == corpus.fingerprint
    with pytest.raises(UserError, match="sequences of length 16, not 32"):
        prepare(corpus.folder, length=32)
    with pytest.raises(UserError, match="the tokenizer word, not bpe"):
        prepare(corpus.folder, length=16, tokenizer="bpe")


def test_windows_are_all_stretches_of_the_training_tokens(corpus: Corpus) -> None:
    tokens = np.asarray(corpus.train).ravel()
    assert corpus.windows.shape == (30 * 16 - 15, 16)
    for first in (0, 1, 17, 30 * 16 - 16):
        np.testing.assert_array_equal(corpus.windows[first], tokens[first : first + 16])
    assert np.shares_memory(corpus.windows, corpus.train)  # nothing is copied
