from __future__ import annotations

import errno
import json
import random
from pathlib import Path

import pytest
import torch

from convergeflow.errors import ConvergeFlowError
from convergeflow.systems.protocol import read_tensors, write_tensors
from convergeflow.training import checkpoint
from convergeflow.training.checkpoint import BrokenCheckpoint


def save(run: Path, step: int, keep: int = 3) -> Path:
    def write(folder: Path) -> None:
        write_tensors(folder / "model.safetensors", {"w": torch.full((50,), float(step))})
        checkpoint.write_json(folder / "trainer.json", {"step": step})

    return checkpoint.save_step(run, step, write, keep=keep)


def test_newest_is_found_and_old_ones_are_removed(tmp_path: Path) -> None:
    for step in (5, 10, 100, 1000):
        save(tmp_path, step, keep=2)
    assert [checkpoint.step_of(path) for path in checkpoint.present(tmp_path)] == [100, 1000]
    newest = checkpoint.newest_whole(tmp_path, pytest.fail)
    assert newest is not None and newest.name == "step-00001000"
    assert float(read_tensors(newest / "model.safetensors")["w"][0]) == 1000.0


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.json", "manifest.json"])
def test_truncated_is_refused_by_name_and_the_previous_used(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2) / name
    path.write_bytes(path.read_bytes()[:-3])
    warnings: list[str] = []
    found = checkpoint.newest_whole(tmp_path, warnings.append)
    assert found is not None and found.name == "step-00000001"
    assert len(warnings) == 1 and "step-00000002" in warnings[0] and name in warnings[0]


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.json"])
def test_any_flipped_bit_is_refused(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1)
    original = (folder / name).read_bytes()
    for position in random.Random(0).sample(range(len(original)), 15):
        changed = bytearray(original)
        changed[position] ^= 1
        (folder / name).write_bytes(changed)
        with pytest.raises(BrokenCheckpoint, match=name):
            checkpoint.verify(folder)
    (folder / name).write_bytes(original)
    checkpoint.verify(folder)


def test_a_changed_manifest_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["trainer.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BrokenCheckpoint, match="was changed"):
        checkpoint.verify(folder)


def test_missing_file_and_missing_manifest(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "trainer.json").unlink()
    with pytest.raises(BrokenCheckpoint, match=r"trainer\.json is missing"):
        checkpoint.verify(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(BrokenCheckpoint, match="no readable"):
        checkpoint.verify(folder)
    assert checkpoint.newest_whole(tmp_path, lambda message: None) is None


@pytest.mark.parametrize("where", ["write_bytes", "write_text", "rename"])
def test_full_disk_is_one_line_and_leaves_older_ones_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    old = save(tmp_path, 1, keep=1)

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, where, refuse)
    with pytest.raises(ConvergeFlowError) as caught:
        save(tmp_path, 2, keep=1)
    monkeypatch.undo()
    message = str(caught.value)
    assert "disk is full" in message and "step-00000002" in message and "\n" not in message
    checkpoint.verify(old)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_leftovers_of_a_crash_are_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    unfinished = tmp_path / "checkpoints" / ".unfinished-step-00000002"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"half")
    found = checkpoint.newest_whole(tmp_path, pytest.fail)
    assert found is not None and found.name == "step-00000001"
    assert save(tmp_path, 2).is_dir() and not unfinished.exists()


def test_a_broken_later_folder_is_removed_once_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    broken = save(tmp_path, 9)
    (broken / "model.safetensors").write_bytes(b"")
    save(tmp_path, 2)
    assert not broken.exists()


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for text in ("one", "two"):
        checkpoint.write_folder(target, lambda folder, text=text: (folder / text).write_text(text) and None)
    assert sorted(path.name for path in target.iterdir()) == ["manifest.json", "two"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_every_so_many_steps_are_kept_for_good(tmp_path: Path) -> None:
    for step in range(2, 22, 2):
        checkpoint.save_step(tmp_path, step, lambda folder: None, keep=2, keep_every=6)
    assert [checkpoint.step_of(folder) for folder in checkpoint.present(tmp_path)] == [6, 12, 18, 20]
