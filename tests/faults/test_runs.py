"""Run folders: findings 1, 7, 9, 11, 12, 16, 17, 18, 23, and corpora and fetched data (6, 8, 10) that runs rely on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import RECIPE, Outcome

from convergeflow import files
from convergeflow.data import fetch
from convergeflow.data.prepare import prepare
from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.training import checkpoint, run
from convergeflow.training.config import resolve
from convergeflow.training.trainer import Reporter

Command = Callable[..., Outcome]


def finish(out: Path) -> None:
    run.train(run.saved_config(out), out, resume=True)


# --- 1: a run.json that is torn is replaced by the hashed copy in the checkpoint ---


@pytest.mark.parametrize("damage", [b"", b'{"corpus": {"na', b"\xff\xfe", b"[]", b'{"batch": "many"}'])
def test_1_a_torn_run_file_does_not_lock_the_run(copied: Path, trained: Path, damage: bytes, command: Command) -> None:
    shutil.rmtree(copied / "model")
    (copied / "run.json").write_bytes(damage)
    assert command("train", "--out", copied, "--resume").code == 0
    assert (copied / "run.json").read_bytes() == (trained / "run.json").read_bytes()
    expected = (trained / "model/model.safetensors").read_bytes()
    assert (copied / "model/model.safetensors").read_bytes() == expected


def test_1_without_a_checkpoint_the_fix_is_named(tmp_path: Path, command: Command) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_bytes(b'{"corp')
    refused = command("train", "--out", tmp_path / "run", "--resume")
    assert refused.code == 2 and "start again" in refused.line


# --- 6: prepare removes nothing that is not its own ---


@pytest.mark.parametrize("foreign", [{"thesis.tex": "years"}, {"manifest.json": "{}", "thesis.tex": "years"}])
def test_6_overwriting_is_for_corpora_alone(tmp_path: Path, foreign: dict[str, str], command: Command) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, text in foreign.items():
        (folder / name).write_text(text)
    refused = command("prepare", "stories", "--blocks", 4, "--heldout-blocks", 2, "--overwrite", "--out", folder)
    assert refused.code == 2 and "not a corpus" in refused.line
    assert (folder / "thesis.tex").read_text() == "years"


def test_6_overwriting_a_corpus_still_works(tmp_path: Path, command: Command) -> None:
    words = ("prepare", "stories", "--heldout-blocks", 2, "--overwrite", "--out", tmp_path / "data")
    assert command(*words, "--blocks", 4).code == 0
    assert command(*words, "--blocks", 5).code == 0


def test_6_a_foreign_partial_folder_is_not_deleted(tmp_path: Path, command: Command) -> None:
    partial = tmp_path / "data.partial"
    partial.mkdir()
    (partial / "thesis.tex").write_text("years")
    refused = command("prepare", "stories", "--blocks", 4, "--heldout-blocks", 2, "--out", tmp_path / "data")
    assert refused.code == 2 and "data.partial" in refused.line
    assert (partial / "thesis.tex").read_text() == "years"


# --- 7: a run overwrites nothing that is not a run ---


@pytest.mark.parametrize("name", ["journal.jsonl", "timing.jsonl", "model/weights", "checkpoints/step-00000001/x"])
def test_7_foreign_files_in_out_are_kept(tmp_path: Path, name: str, command: Command) -> None:
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    refused = command("train", *RECIPE, "--out", tmp_path / "run")
    assert refused.code == 2 and "choose another" in refused.line
    assert path.read_text() == "mine" and not (tmp_path / "run/run.json").exists()


@pytest.mark.parametrize("name", ["journal.jsonl", "model"])
def test_7_nothing_is_written_through_a_symbolic_link(tmp_path: Path, name: str, command: Command) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").write_text("mine")
    (tmp_path / "run").mkdir()
    target = tmp_path / "elsewhere" / ("file" if "." in name else "")
    (tmp_path / "run" / name).symlink_to(target)
    assert command("train", *RECIPE, "--out", tmp_path / "run").code == 2
    assert (tmp_path / "elsewhere/file").read_text() == "mine"


def test_7_a_journal_that_became_a_link_is_not_followed(copied: Path, tmp_path: Path, command: Command) -> None:
    shutil.rmtree(copied / "model")
    (copied / "journal.jsonl").rename(tmp_path / "moved")
    (copied / "journal.jsonl").symlink_to(tmp_path / "moved")
    refused = command("train", "--out", copied, "--resume")
    assert refused.code == 2 and "symbolic link" in refused.line


# --- 8: a corpus that was changed is not trained on ---


@pytest.mark.parametrize("name", ["train.bin", "heldout.bin", "unigram.npy", "tokenizer.json"])
def test_8_a_changed_corpus_is_refused(tmp_path: Path, name: str, command: Command) -> None:
    folder = tmp_path / "data"
    assert (
        command("prepare", "stories", "--blocks", 16, "--heldout-blocks", 4, "--length", 32, "--out", folder).code == 0
    )
    path = folder / name
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    refused = command("train", *RECIPE, f"corpus.name={folder}", "corpus.blocks=null", "--out", tmp_path / "run")
    assert (refused.code in (1, 2) and "prepare the corpus again" in refused.line) or "not a tokenizer" in refused.line


# --- 9: run.json is not believed against the checkpoint ---


def test_9_an_edited_run_file_is_refused(copied: Path, command: Command) -> None:
    values = json.loads((copied / "run.json").read_text())
    values["stages"][0]["lr"] *= 2
    (copied / "run.json").write_text(json.dumps(values))
    refused = command("train", "--out", copied, "--resume")
    assert refused.code == 2 and "stages.0.lr" in refused.line and "edited" in refused.line


# --- 10: fetched data is compared by hash when it is used ---


def test_10_changed_data_of_the_same_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path))
    folder = fetch.folder_of("sotu")
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("speech")
    facts = {"bytes": 6, "sha256": files.file_hash(folder / "a.txt")}
    record = {"requirement": "x", "sha256": fetch.package("sotu").sha256, "files": {"a.txt": facts}}
    (folder / "fetched.json").write_text(json.dumps(record))
    assert fetch.fetched("sotu") == folder
    (folder / "a.txt").write_text("Speech")
    with pytest.raises(UserError, match="changed"):
        fetch.fetched("sotu")


# --- 11: one process at a time ---


def test_11_two_processes_do_not_share_a_run(copied: Path, command: Command) -> None:
    with files.only_writer(copied, "it"):
        refused = command("train", "--out", copied, "--resume")
    assert refused.code == 2 and "another process" in refused.line
    assert command("train", "--out", copied, "--resume").code == 0  # the lock went with its holder


# --- 12: a run whose folder is gone says so ---


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_12_a_run_folder_that_disappears_is_an_error(tmp_path: Path, how: str) -> None:
    out, seen = tmp_path / "run", []

    def advance(*amount: object, **fields: object) -> None:
        seen.append(1)
        if len(seen) == 3:
            if how == "deleted":
                shutil.rmtree(out)
            else:
                out.rename(tmp_path / "other")
            if how == "replaced":
                out.mkdir()
                (out / "journal.jsonl").write_text("")

    with pytest.raises(ConvergeFlowError, match=r"journal\.jsonl was deleted"):
        run.train(resolve(RECIPE[0], RECIPE[1:]), out, reporter=Reporter(advance=advance))


# --- 16: a lost process has a name, and one that is asked to stop stops all ---


def test_16_a_lost_process_is_named(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    def lose(*words: object, **options: object) -> None:
        raise RuntimeError("[enforce fail at tcp/pair.cc] Connection closed by peer [127.0.0.1]:21477 (gloo)")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(run, "make_accelerator", lose)
    failed = command("train", *RECIPE)
    assert failed.code == 1 and "another process" in failed.line and "--resume" in failed.line


def test_16_a_signal_to_one_process_ends_all_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from convergeflow.training.trainer import Trainer

    step = Trainer._train_step

    def asked_elsewhere(self: Trainer, number: int, *given: Any) -> tuple[dict[str, float], bool]:
        return step(self, number, *given)[0], number == 1  # what the exchange says when another process got the signal

    monkeypatch.setattr(Trainer, "_train_step", asked_elsewhere)
    ended = run.train(resolve(RECIPE[0], RECIPE[1:]), tmp_path / "run")
    assert (ended.finished, ended.signal_number, ended.step) == (False, signal.SIGTERM, 2)


# --- 17: the journal in front of the checkpoint is part of it ---


def test_17_a_flipped_byte_in_the_journal_is_found(copied: Path, command: Command) -> None:
    content = bytearray((copied / "journal.jsonl").read_bytes())
    content[content.index(b'"loss": ') + 9] ^= 1
    (copied / "journal.jsonl").write_bytes(content)
    refused = command("train", "--out", copied, "--resume")
    assert refused.code == 2 and "journal.jsonl" in refused.line


# --- 18: hints can be copied into a shell ---


def test_18_hints_are_quoted(tmp_path: Path, command: Command) -> None:
    out = tmp_path / "my run $(touch pwned)"
    done = command("train", *RECIPE, "--out", out)
    assert done.code == 0 and f"--model '{out / 'model'}'" in done.out


# --- 23 and the writer itself ---


def test_23_all_files_of_a_run_have_the_rights_that_the_user_gives(tmp_path: Path, command: Command) -> None:
    before = os.umask(0o027)
    try:
        assert command("train", *RECIPE, "--out", tmp_path / "run").code == 0
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert modes and set(modes.values()) == {0o640}, modes


def test_23_a_replaced_file_keeps_its_rights(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    files.write_json(path, 1)
    path.chmod(0o604)
    files.write_json(path, 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "socket"])
def test_19_only_plain_files_are_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out.json"
    if kind == "link":
        (tmp_path / "precious").write_text("mine")
        path.symlink_to(tmp_path / "precious")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        # Never a real device: where this fails, it is replaced for everybody.
        socket.socket(socket.AF_UNIX).bind(str(path))
    with pytest.raises(UserError, match=r"symbolic link|device|folder"):
        files.write_json(path, 1)
    assert kind != "link" or (tmp_path / "precious").read_text() == "mine"
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(files.DRAFT)] == []


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    files.write_json(tmp_path / "a.json", "old")

    def refuse(*words: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, call, refuse)
        with pytest.raises(OSError, match="space"):
            files.write_json(tmp_path / "a.json", "new")
    assert json.loads((tmp_path / "a.json").read_text()) == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_whose_exchange_was_cut_short_comes_back(tmp_path: Path) -> None:
    with files.replacing_folder(tmp_path / "model") as draft:
        (draft / "a").write_text("old")
    (tmp_path / "model").rename(tmp_path / ".unfinished-old-model")  # killed between the two renames
    with pytest.raises(KeyError), files.replacing_folder(tmp_path / "model"):
        raise KeyError
    assert (tmp_path / "model/a").read_text() == "old"


def test_a_checkpoint_manifest_cannot_point_outside(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "model").mkdir()
    entry = {"bytes": 1, "sha256": files.file_hash(tmp_path / "secret")}
    manifest = {"format": 1, "files": {"../secret": entry}}
    checkpoint.write_json(tmp_path / "model/manifest.json", {**manifest, "sha256": checkpoint._own_hash(manifest)})
    with pytest.raises(checkpoint.BrokenCheckpoint, match="outside"):
        checkpoint.verify(tmp_path / "model")


def test_8_verify_reads_every_file_that_training_reads(tmp_path: Path) -> None:
    corpus = prepare("stories", tmp_path / "c", blocks=4, heldout_blocks=2, length=8)
    assert {"train.bin", "heldout.bin", "unigram.npy", "tokenizer.json"} == set(corpus.manifest["sha256"])
    np.save(corpus.folder / "unigram.npy", np.zeros(3))
    with pytest.raises(ConvergeFlowError, match="changed"):
        corpus.verify()
    with pytest.raises(ConvergeFlowError, match="damaged"):
        _ = corpus.unigram
