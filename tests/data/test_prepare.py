"""Text to corpus and back: nothing lost, nothing shared between the splits, stopped runs go on, mistakes are named."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convergeflow.data import CORPORA, packing, sources
from convergeflow.data import prepare as room
from convergeflow.data.prepare import prepare
from convergeflow.data.stories import stories_law
from convergeflow.errors import UserError

WORDS = "we the people hold that every year has its own work and its own hope".split()  # noqa: SIM905


def speech(number: int) -> str:
    return "\n".join(
        f"Paragraph {line} of speech {number}: {' '.join(WORDS[(number + line) % 9 :])}." for line in range(12)
    )


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(speech(number), encoding="utf-8")
    return sorted(folder.iterdir())


# --- stories ---


def test_stories_are_draws_of_the_law(cache: Path) -> None:
    corpus = prepare("stories", length=48, blocks=300, heldout_blocks=50)
    assert corpus.folder.parent == cache / "corpora"
    assert corpus.train.shape == (300, 48) and corpus.heldout.shape == (50, 48)
    assert corpus.train.dtype == np.dtype("<u2")
    law = stories_law()
    assert np.isfinite(law.clean_nll(corpus.train)).all() and np.isfinite(law.clean_nll(corpus.heldout)).all()
    assert corpus.vocabulary == len(law.vocabulary)
    assert not {tuple(row) for row in corpus.train.tolist()} & {tuple(row) for row in corpus.heldout.tolist()}
    counts = np.bincount(corpus.train.ravel(), minlength=corpus.vocabulary)
    np.testing.assert_allclose(corpus.unigram, counts / counts.sum())
    corpus.verify()


def test_the_second_call_only_opens(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare("stories", length=32, blocks=20, heldout_blocks=5)
    monkeypatch.setattr(room._Stories, "write", None)  # would fail if called
    again = prepare("stories", length=32, blocks=20, heldout_blocks=5)
    assert again.folder == first.folder and again.fingerprint == first.fingerprint


def test_settings_have_folders_of_their_own(cache: Path) -> None:
    made = [
        prepare("stories", length=32, blocks=20, heldout_blocks=5),
        prepare("stories", length=33, blocks=20, heldout_blocks=5),
        prepare("stories", length=32, blocks=20, heldout_blocks=5, seed=1),
    ]
    assert len({corpus.folder for corpus in made}) == len({corpus.fingerprint for corpus in made}) == 3


# --- files ---


@pytest.mark.parametrize("tokenizer", ["bpe", "byte", "word"])
def test_text_comes_back_and_documents_stay_on_their_side(tokenizer: str, texts: list[Path]) -> None:
    corpus = prepare(texts, tokenizer=tokenizer, vocabulary=None if tokenizer == "byte" else 300, length=16)
    splits = corpus.manifest["splits"]
    end = corpus.tokenizer.end_id
    stream = {split: getattr(corpus, split).ravel().tolist() for split in ("train", "heldout")}
    # All but the dropped rest is there: each document once, with an end token behind it.
    for split in ("train", "heldout"):
        assert splits[split]["dropped_tokens"] < 16
        assert splits[split]["tokens"] == len(stream[split])
    assert abs(stream["train"].count(end) - 38) <= 1 and abs(stream["heldout"].count(end) - 2) <= 1
    first, _, _ = corpus.tokenizer.decode(stream["train"][: stream["train"].index(end)]).partition("\x00")
    held_out = {text[:25].lower() for text in corpus.tokenizer.decode(stream["heldout"]).split("Paragraph 0")}
    train = {text[:25].lower() for text in corpus.tokenizer.decode(stream["train"]).split("Paragraph 0")}
    assert not (held_out & train) - {""}
    if tokenizer != "word":
        assert first in {speech(number) for number in range(40)}
        text_bytes = sum(len(speech(number).encode()) for number in range(40))
        assert splits["train"]["text_bytes"] + splits["heldout"]["text_bytes"] == text_bytes


def test_txt_jsonl_and_parquet_give_the_same_blocks(texts: list[Path], tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    contents = [path.read_text() for path in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"id": 1, "text": text}) for text in contents) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.table({"body": contents}), tmp_path / "a.parquet")
    from_txt = prepare(tmp_path / "texts", tokenizer="byte")
    from_jsonl = prepare(tmp_path / "a.jsonl", tokenizer="byte")
    from_parquet = prepare(str(tmp_path / "a.parquet"), tokenizer="byte", text_field="body")
    for other in (from_jsonl, from_parquet):
        np.testing.assert_array_equal(other.train, from_txt.train)
        np.testing.assert_array_equal(other.heldout, from_txt.heldout)
    assert from_jsonl.fingerprint != from_txt.fingerprint  # another source


@pytest.mark.parametrize("share", [0.02, 0.04, 0.06, 0.1])
def test_copies_of_a_document_fall_on_one_side(tmp_path: Path, share: float) -> None:
    # The copies lie at odd distances, so that no rule about places in the file would keep them together.
    lines = [json.dumps({"text": speech(number)}) for number in [*range(20), *range(7, 20), *range(19, -1, -1)]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    corpus = prepare(tmp_path / "a.jsonl", tokenizer="byte", length=16, heldout_share=share)
    heads = [
        {text[:14] for text in corpus.tokenizer.decode(getattr(corpus, split).ravel()).split("Paragraph 0")[1:]}
        for split in ("train", "heldout")
    ]
    assert heads[1] and not heads[0] & heads[1]


def test_one_file_is_held_out_by_its_end(tmp_path: Path) -> None:
    text = "\n".join(f"line number {number}" for number in range(400))
    (tmp_path / "book.txt").write_text(text)
    corpus = prepare(tmp_path / "book.txt", tokenizer="byte", length=8, heldout_share=0.1)
    held_out = corpus.tokenizer.decode(corpus.heldout.ravel())
    assert held_out.startswith("line number 36") and text.endswith(held_out[-8:])
    assert "last 0.1 of each document" in corpus.manifest["split"]


def test_a_short_text_still_has_a_held_out_block(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 40)
    corpus = prepare(tmp_path / "a.txt", tokenizer="byte", length=16)
    assert corpus.heldout.shape == (1, 16) and corpus.train.shape == (1, 16)
    assert "last block" in corpus.manifest["split"]


def test_a_long_document_is_encoded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(speech(number) for number in range(5))
    (tmp_path / "a.txt").write_text(text)
    whole = prepare(tmp_path / "a.txt", tmp_path / "whole", tokenizer="byte")
    monkeypatch.setattr(room, "_PIECE", 100)
    parts = prepare(tmp_path / "a.txt", tmp_path / "parts", tokenizer="byte")
    np.testing.assert_array_equal(whole.train, parts.train)


def test_large_vocabularies_use_wider_numbers(texts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.Tokenizer, "size", property(lambda self: 70_000))
    corpus = prepare(texts, tokenizer="byte")
    assert corpus.train.dtype == np.dtype("<u4") and corpus.manifest["dtype"] == "uint32"
    monkeypatch.undo()
    assert "Paragraph" in corpus.tokenizer.decode(corpus.train[0])


def test_a_tokenizer_of_another_corpus_can_be_used(texts: list[Path], tmp_path: Path) -> None:
    first = prepare(texts, tmp_path / "first", vocabulary=300)
    second = prepare(texts[:25], tmp_path / "second", tokenizer=str(tmp_path / "first"))
    assert second.tokenizer.sha256 == first.tokenizer.sha256


def test_the_same_texts_give_the_same_fingerprint_anywhere(texts: list[Path], tmp_path: Path) -> None:
    import shutil

    shutil.copytree(tmp_path / "texts", tmp_path / "elsewhere" / "texts")
    here = prepare(tmp_path / "texts", vocabulary=300)
    there = prepare(tmp_path / "elsewhere" / "texts", vocabulary=300)
    assert here.folder != there.folder and here.fingerprint == there.fingerprint
    assert str(tmp_path) not in json.dumps(here.manifest)


# --- what a folder holds ---


def test_every_text_file_of_a_folder_is_read_and_the_rest_is_listed(tmp_path: Path) -> None:
    folder = tmp_path / "papers"
    (folder / "inner").mkdir(parents=True)
    for number, name in enumerate(["LICENSE", "notes.md", "inner/README", "plain.txt"]):
        (folder / name).write_text(speech(number))
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\0\0")
    (folder / "old.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (folder / "nothing").write_bytes(b"")
    (folder / ".hidden").write_text("not for others")
    (folder / "link").symlink_to("LICENSE")
    corpus = prepare(folder, tokenizer="byte", length=16)
    source = corpus.manifest["source"]
    assert {file["name"] for file in source["files"]} == {"LICENSE", "notes.md", "README", "plain.txt"}
    assert source["documents"] == 4
    assert {each["name"]: each["reason"].split(" (")[0] for each in source["skipped"]} == {
        "picture.png": "a binary file",
        "old.txt": "not UTF-8",
        "nothing": "empty",
        ".hidden": "hidden",
        "link": "the same file as LICENSE",
    }
    text = corpus.tokenizer.decode(corpus.train.ravel())
    assert all(f"speech {number}:" in text for number in range(4))


def test_a_folder_of_nothing_but_pictures_says_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\0")
    with pytest.raises(UserError, match=r"holds no text .a\.png: a binary file"):
        prepare(tmp_path)


@pytest.mark.parametrize("seed", range(5))
def test_a_share_of_the_text_is_held_out_not_of_the_documents(tmp_path: Path, seed: int) -> None:
    """A few long documents and many short ones, as folders are: by number of documents a few lines were held out."""
    sizes = np.random.default_rng(seed).pareto(1.2, 60)
    lines = [f"text {seed}.{number}: " + "word " * (20 + int(200 * size)) for number, size in enumerate(sizes)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    corpus = prepare(tmp_path / "a.jsonl", tokenizer="byte", length=16, heldout_share=0.05)
    splits = corpus.manifest["splits"]
    share = splits["heldout"]["tokens"] / (splits["heldout"]["tokens"] + splits["train"]["tokens"])
    assert 0.024 < share < 0.105


def test_one_document_that_is_half_of_the_text_is_not_held_out_whole(tmp_path: Path) -> None:
    """Whichever hash it has: then the end of every document is held out."""
    for salt in range(8):
        lines = [f"{salt} {number} " + "word " * 30 for number in range(25)] + [f"{salt} long " + "word " * 750]
        (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
        splits = prepare(tmp_path / "a.jsonl", tmp_path / f"{salt}", tokenizer="byte", length=16).manifest["splits"]
        assert splits["heldout"]["tokens"] < 0.11 * splits["train"]["tokens"]


@pytest.mark.parametrize("paragraph", [30, 400, 5000])
def test_the_end_that_is_held_out_is_the_share_whatever_the_lines_are(tmp_path: Path, paragraph: int) -> None:
    """The next line end may be far away: a cut there left nothing to hold out."""
    (tmp_path / "a.txt").write_text(("word " * (paragraph // 5) + "\n") * (20_000 // paragraph))
    splits = prepare(tmp_path / "a.txt", tokenizer="byte", length=8).manifest["splits"]
    share = splits["heldout"]["tokens"] / (splits["heldout"]["tokens"] + splits["train"]["tokens"])
    assert 0.037 < share < 0.063


def test_two_sequences_are_held_out_where_two_can_be_spared(tmp_path: Path) -> None:
    """One could be neither scored nor counted: `evaluate` needs one for each."""
    (tmp_path / "a.txt").write_text("x" * 100)
    corpus = prepare(tmp_path / "a.txt", tokenizer="byte", length=16)
    # 95 letters and an end token are six sequences; four stay.
    assert corpus.heldout.shape == (2, 16) and corpus.train.shape == (4, 16)
    assert corpus.tokenizer.decode(corpus.heldout.ravel()) == "x" * 31


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_share_of_a_file_is_its_beginning(tmp_path: Path, name: str) -> None:
    lines = [f"line number {number:04}" for number in range(1000)]
    if name.endswith("jsonl"):
        (tmp_path / name).write_text("\n".join(json.dumps({"text": line}) for line in lines))
    else:
        (tmp_path / name).write_text("\n".join(lines))
    corpus = prepare(tmp_path / name, tokenizer="byte", length=8, share=0.25)
    text = corpus.tokenizer.decode(np.concatenate([corpus.train.ravel(), corpus.heldout.ravel()]))
    numbers = sorted(int(word) for word in text.split() if word.isdigit() and len(word) == 4)
    assert numbers[0] == 0 and 245 <= numbers[-1] <= 255
    assert corpus.manifest["source"]["share"] == 0.25
    with pytest.raises(UserError, match="`share` must be above 0"):
        prepare(tmp_path / name, share=0.0)


# --- speeches ---


def test_speeches_hold_out_the_named_ones(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="convergeflow fetch sotu"):
        prepare("sotu")
    folder = cache / "fetched" / "sotu"
    (folder / "speeches").mkdir(parents=True)
    names = [*sources.HELD_OUT_SPEECHES[:3], "1790-Washington-1.txt", "1791-Washington-1.txt", "1900-McKinley-1.txt"]
    for number, name in enumerate(names):
        (folder / "speeches" / name).write_text(speech(number), encoding="utf-8")
    monkeypatch.setattr(sources, "fetched", lambda name: folder)
    corpus = prepare("sotu", vocabulary=300, length=16)
    text = corpus.tokenizer.decode(corpus.heldout.ravel())
    assert {number for number in range(6) if f"speech {number}:" in text} == {0, 1, 2}
    text = corpus.tokenizer.decode(corpus.train.ravel())
    assert {number for number in range(6) if f"speech {number}:" in text} == {3, 4, 5}
    assert corpus.name == "sotu" and corpus.tokenizer.kind == "bpe"
    assert len(sources.HELD_OUT_SPEECHES) == len(set(sources.HELD_OUT_SPEECHES))


# --- stopping and going on ---


class Stopped(Exception):
    pass


@pytest.mark.parametrize("after", [2, 5, 9])
def test_a_stopped_run_goes_on_to_the_same_bytes(
    texts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(room, "_BATCH", 2000)
    monkeypatch.setattr(room, "_NOTE_EVERY", 1500)
    unbroken = prepare(texts, tmp_path / "unbroken", vocabulary=300)
    seen: list[int] = []

    def stop(stage: str, done: int, total: int | None) -> None:
        if stage.startswith("packing"):
            seen.append(done)
            if len(seen) == after:
                raise Stopped

    target = tmp_path / "broken"
    with pytest.raises(Stopped):
        prepare(texts, target, vocabulary=300, progress=stop)
    assert not target.exists()
    # What lies behind the last note is not trusted.
    with open(tmp_path / "broken.partial" / "train.bin", "ab") as stream:
        stream.write(b"torn")
    learned: list[int] = []
    monkeypatch.setattr(room, "build", lambda *_: learned.append(1))
    again: list[int] = []
    corpus = prepare(
        texts,
        target,
        vocabulary=300,
        progress=lambda stage, done, total: again.append(done) if stage.startswith("packing") else None,
    )
    assert not learned  # the tokenizer was kept
    assert again[0] > 0 and (after < 5 or again[0] > seen[0])
    assert corpus.fingerprint == unbroken.fingerprint
    assert (target / "train.bin").read_bytes() == (tmp_path / "unbroken" / "train.bin").read_bytes()
    assert not (tmp_path / "broken.partial").exists()


def test_a_full_disk_leaves_a_run_that_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = packing.Unfinished.append
    calls = []

    def full(work: packing.Unfinished, split: str, ids: np.ndarray) -> None:
        calls.append(split)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(work.folder))
        real(work, split, ids)

    monkeypatch.setattr(packing.Unfinished, "append", full)
    settings: dict[str, Any] = {"length": 16, "blocks": 20, "heldout_blocks": 5}
    with pytest.raises(OSError, match="No space left"):
        prepare("stories", tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()
    corpus = prepare("stories", tmp_path / "out", **settings)
    corpus.verify()
    assert corpus.fingerprint == prepare("stories", tmp_path / "other", **settings).fingerprint


def test_other_settings_start_afresh(texts: list[Path], tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int | None) -> None:
        if stage.startswith("packing"):
            raise Stopped

    with pytest.raises(Stopped):
        prepare(texts, tmp_path / "out", vocabulary=300, progress=stop)
    corpus = prepare(texts, tmp_path / "out", vocabulary=290)
    assert corpus.fingerprint == prepare(texts, tmp_path / "other", vocabulary=290).fingerprint


# --- mistakes ---


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (b"", {}, "empty"),
        (b" \n\t\n", {}, "empty"),
        (b"caf\xe9 au lait", {}, "not UTF-8 text .byte 0xe9 at offset 3"),
        (b"a few words", {"tokenizer": "byte"}, "too little text"),
        (b"text", {"tokenizer": "bpee"}, "did you mean 'bpe'"),
        (b"text", {"vocabulary": 50}, "at least 257"),
        (b"text", {"vocabulary": -1}, "`vocabulary` must be at least 1"),
        (b"text", {"length": 0}, "`length` must be at least 1"),
        (b"text", {"heldout_share": 1.5}, "between 0 and 1"),
        (b"text", {"tokenizer": "gpt2"}, "convergeflow fetch gpt2-bpe"),
    ],
)
def test_wrong_texts_and_settings(
    content: bytes, settings: dict[str, Any], message: str, tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        prepare(tmp_path / "a.txt", **settings)
    assert "\n" not in str(caught.value)
    assert not list((cache / "corpora").glob("*")) if (cache / "corpora").exists() else True


def test_wrong_sources(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        prepare(tmp_path / "missing.txt")
    with pytest.raises(UserError, match="did you mean 'stories'"):
        prepare("storys")
    (tmp_path / "a.pdf").write_bytes(b"%PDF\0\1")
    with pytest.raises(UserError, match=r"a\.pdf is not text"):
        prepare(tmp_path / "a.pdf")
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"holds no text .it is empty"):
        prepare(tmp_path / "none")
    with pytest.raises(UserError, match="made of words"):
        prepare("stories", vocabulary=1000)
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        prepare(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"body": "fine"}\n')
    with pytest.raises(UserError, match=r"no field 'text' .it has body"):
        prepare(tmp_path / "b.jsonl")
    (tmp_path / "c.parquet").write_bytes(b"not a table")
    with pytest.raises(UserError, match="not a parquet file"):
        prepare(tmp_path / "c.parquet")


def test_a_row_without_a_text_is_empty_and_another_kind_is_shown(tmp_path: Path) -> None:
    rows = [json.dumps({"text": "so it goes on and on. " * 20 if number % 2 else None}) for number in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    assert prepare(tmp_path / "a.jsonl", tokenizer="byte", length=16).manifest["source"]["documents"] == 30
    for row, says in (
        ({"text": 1.5}, "holds 1.5, not text"),
        ({"text": ["a"]}, r'holds \["a"\], not text'),
        ([1, 2], r"line 1 is \[1, 2\]: a line must be a text"),
        (None, "line 1 is null"),
    ):
        (tmp_path / "b.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(UserError, match=says):
            prepare(tmp_path / "b.jsonl")


def test_a_folder_with_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.doc").write_text("dear")
    settings: dict[str, Any] = {"length": 16, "blocks": 4, "heldout_blocks": 2}
    with pytest.raises(UserError, match="is not this corpus"):
        prepare("stories", tmp_path / "mine", **settings)
    assert (tmp_path / "mine" / "letter.doc").read_text() == "dear"
    first = prepare("stories", tmp_path / "corpus", **settings)
    with pytest.raises(UserError, match="is not this corpus"):
        prepare("stories", tmp_path / "corpus", **{**settings, "seed": 1})
    second = prepare("stories", tmp_path / "corpus", overwrite=True, **{**settings, "seed": 1})
    assert second.fingerprint != first.fingerprint


def test_a_corpus_of_another_package_is_prepared_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is installed beside this one registers a corpus; here it is two files on the path."""
    (tmp_path / "proverbs.py").write_text(
        "from pathlib import Path\n"
        "from convergeflow.data.sources import Files\n"
        "def proverbs(limit=None):\n"
        "    return Files('proverbs', [Path(__file__).with_name('proverbs.txt')], limit=limit)\n"
    )
    (tmp_path / "proverbs.txt").write_text("a stitch in time saves nine\n" * 40)
    described = tmp_path / "proverbs-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: proverbs\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[convergeflow.corpora]\nproverbs = proverbs:proverbs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(CORPORA, "_known", dict(CORPORA._known))  # what is found is remembered, here for this test only
    corpus = prepare("proverbs", tmp_path / "corpus", tokenizer="byte", length=16)
    assert corpus.name == "proverbs"
    assert corpus.tokenizer.decode(corpus.train[0].tolist()) == "a stitch in time"
