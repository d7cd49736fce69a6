"""Every tokenizer through the same questions, and each against what is known about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from convergeflow.data.stories import stories_law
from convergeflow.data.tokenizer import (
    Tokenizer,
    build,
    byte_tokenizer,
    gpt2_tokenizer,
    stories_tokenizer,
    train_bpe,
    train_words,
    train_words_and_bytes,
)
from convergeflow.errors import UserError

TEXT = "Mia was a kind girl. Her hat was purple."
TRICKY = "  Zwölf Boxkämpfer,\n\n\tjagen  <end> 日本 🙂 it's 1,024.50! <|endoftext|>\x00"


def small_gpt2(folder: Path) -> Path:
    """The files of GPT-2's tokenizer in small: 256 bytes, two merges, and the end token last."""
    folder.mkdir(parents=True)
    symbols = byte_tokenizer().tokens()[:256]
    vocabulary = {symbol: index for index, symbol in enumerate([*symbols, "he", "Ġhe", "<|endoftext|>"])}
    (folder / "encoder.json").write_text(json.dumps(vocabulary))
    (folder / "vocab.bpe").write_text("#version: 0.2\nh e\nĠ he\n", encoding="utf-8")
    return folder


MAKERS: dict[str, Callable[[Path], Tokenizer]] = {
    "word": lambda path: train_words([TEXT, TRICKY], 100),
    "stories": lambda path: stories_tokenizer(),
    "word-byte": lambda path: train_words_and_bytes([TEXT], 262),
    "bpe": lambda path: train_bpe([TEXT] * 20, 280),
    "byte": lambda path: byte_tokenizer(),
    "gpt2": lambda path: gpt2_tokenizer(small_gpt2(path / "gpt2")),
}


@pytest.mark.parametrize("name", MAKERS)
def test_contract(name: str, tmp_path: Path) -> None:
    tokenizer = MAKERS[name](tmp_path)
    ids = tokenizer.encode(TEXT)
    assert all(0 <= index < tokenizer.size for index in ids)
    assert tokenizer.end_id not in ids and tokenizer.end_id < tokenizer.size
    assert len(tokenizer.tokens()) == tokenizer.size
    assert tokenizer.tokens()[tokenizer.end_id] == tokenizer.end
    assert tokenizer.decode(ids).lower() == TEXT.lower()
    assert tokenizer.decode([*ids, tokenizer.end_id, *ids]).count("\n") == 1
    tokenizer.save(tmp_path / "saved")
    again = Tokenizer.load(tmp_path / "saved")
    assert again.encode(TEXT) == ids
    assert (again.sha256, again.kind, again.end_id) == (tokenizer.sha256, tokenizer.kind, tokenizer.end_id)


@pytest.mark.parametrize("name", MAKERS)
def test_transformers_reads_the_folder(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = MAKERS[name](tmp_path)
    tokenizer.save(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs.encode(TEXT, add_special_tokens=False) == tokenizer.encode(TEXT)
    assert theirs.eos_token_id == tokenizer.end_id
    assert len(theirs) == tokenizer.size
    assert theirs.decode(tokenizer.encode(TEXT)).lower() == TEXT.lower()


@pytest.mark.parametrize("name", ["word-byte", "bpe", "byte", "gpt2"])
def test_byte_level_text_comes_back_exactly(name: str, tmp_path: Path) -> None:
    tokenizer = MAKERS[name](tmp_path)
    ids = tokenizer.encode(TRICKY)
    assert tokenizer.decode(ids) == TRICKY
    assert tokenizer.end_id not in ids  # its name in a text is only text


def test_bytes_are_their_own_ids() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("Aé\n") == [65, 0xC3, 0xA9, 10]
    assert (tokenizer.size, tokenizer.end_id) == (257, 256)


def test_stories_have_the_ids_of_their_law() -> None:
    law, tokenizer = stories_law(), stories_tokenizer()
    assert tokenizer.tokens() == law.vocabulary
    assert tokenizer.end_id == 0
    words = TEXT.lower().replace(".", " .").replace(",", " ,").split()
    assert tokenizer.encode(TEXT) == [law.word_id[word] for word in words]
    story = [*tokenizer.encode(TEXT), 0, *tokenizer.encode("Now Tom was happy.")]
    assert tokenizer.decode(story) == TEXT + "\nNow Tom was happy."
    with pytest.raises(UserError, match="'zebra'"):
        tokenizer.encode("A zebra came.")


def test_merges_follow_the_file(tmp_path: Path) -> None:
    tokenizer = gpt2_tokenizer(small_gpt2(tmp_path / "gpt2"))
    assert tokenizer.encode("he he") == [256, 257]
    assert tokenizer.encode("the") == [ord("t"), 256]
    assert tokenizer.end_id == 258


def test_bpe_learns_what_is_frequent() -> None:
    tokenizer = train_bpe(["banana banana banana"] * 5, 270)
    assert len(tokenizer.encode(" banana")) == 1
    assert tokenizer.size <= 270 and tokenizer.end_id == 0


def test_whole_words_before_pieces_and_bytes() -> None:
    tokenizer = train_words_and_bytes(["so so some day, so some"], 260)
    # " so" and " some" twice, of the words that come once the first in the alphabet; each with its space.
    assert tokenizer.tokens()[257:] == ["Ġso", "Ġsome", "so"]
    pieces = [[tokenizer.tokens()[index] for index in tokenizer.encode(text)] for text in (" some so", "so soon", "én")]
    assert pieces == [["Ġsome", "Ġso"], ["so", "Ġso", "o", "n"], ["Ã", "©", "n"]]


def test_rare_words_become_unknown() -> None:
    tokenizer = train_words(["a a a b b c"], 4)
    assert tokenizer.tokens() == ["<end>", "<unknown>", "a", "b"]
    assert tokenizer.encode("a c b") == [2, 1, 3]


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'bpe'"):
        build("bpee", iter([]), None, 300)
    for kind in ("bpe", "word-byte"):
        with pytest.raises(UserError, match="257"):
            build(kind, iter([]), 100, 300)
    with pytest.raises(UserError, match="has 257 tokens, not 300"):
        build("byte", iter([]), 300, 300)
    with pytest.raises(UserError, match="convergeflow fetch gpt2-bpe"):
        build("gpt2", iter([]), None, 300)
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer"):
        Tokenizer.load(tmp_path)
