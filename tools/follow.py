"""Follow the README, the start page and the tutorials word by word, on a fresh clone with the wheel installed.

A reader is played: blocks are run in their order, in one shell and one Python session per page.

    ```bash runnable         run; the page's shell keeps its folder and its variables
    ```python runnable       run; the page's Python session keeps its names
    ```python file=NAME      written to NAME, as the text asks (any language)
    ```text output           must be what the block before it printed; `...` stands for anything

Other blocks are for reading. Three things are different from what a reader does, so that this fits into CI, and they
are printed when they happen: the repository is cloned from this one, `make setup` takes an environment that has the
wheel of `make wheel` and the dependencies of .venv, and `--minutes N` becomes `--steps 20`, however slow it is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FRESH = ROOT / "build" / "fresh" / "venv"
BINARIES = "Scripts" if os.name == "nt" else "bin"
TUTORIALS = sorted(page.relative_to(ROOT).as_posix() for page in ROOT.glob("docs/tutorials/*.md"))
PAGES = ["README.md", "docs/index.md", "docs/own-text.md", *TUTORIALS]
FENCE = re.compile(r"^```(\S+)[ ]?(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DONE = "\x1e done"

PYTHON = f"""
import json, sys, traceback
names = {{"__name__": "__main__"}}
for line in sys.stdin:
    code, place = json.loads(line)
    try:
        exec(compile(code, place, "exec"), names)
        print({DONE!r} + " 0", flush=True)
    except BaseException:
        traceback.print_exc()
        print({DONE!r} + " 1", flush=True)
"""


class Failure(Exception):
    """A page that does not do what it says."""


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language, the marks behind it, and its text."""

    place: str
    language: str
    marks: list[str]
    text: str

    @property
    def file(self) -> str | None:
        return next((mark.removeprefix("file=") for mark in self.marks if mark.startswith("file=")), None)


def blocks(page: Path, name: str) -> Iterator[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(f"{name}:{line}", found[1], found[2].split(), found[3])


def matches(expected: str, printed: str) -> bool:
    """Word for word; line breaks do not count, and `...` stands for anything."""
    parts = [r"\s+".join(re.escape(word) for word in part.split()) for part in expected.split("...")]
    return re.fullmatch(r"[\s\S]*?".join(rf"\s*{part}\s*" for part in parts), printed) is not None


class Session:
    """A shell or a Python process that runs one block after the other and says what each printed."""

    def __init__(self, command: list[str], place: Path, environment: dict[str, str]) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the session)
        self.process = subprocess.Popen(
            command,
            cwd=place,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )

    def run(self, line: str) -> str:
        """Feed one line; return what was printed until the end of the block."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        printed: list[str] = []
        for out in self.process.stdout:
            if out.startswith(DONE):
                if out.split()[-1] == "0":
                    return "".join(printed)
                break
            printed.append(out)
        self.errors.seek(0)
        raise Failure("".join(printed) + self.errors.read()[-4000:])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Reader:
    """Someone who does what a page says."""

    def __init__(self, place: Path, environment: dict[str, str], steps: str) -> None:
        self.place, self.environment, self.steps = place, environment, steps
        self.scripts = Path(tempfile.mkdtemp(prefix="follow-"))
        self.shell = Session(["bash", "-euo", "pipefail"], place, environment)
        python = shutil.which("python", path=environment["PATH"]) or sys.executable
        self.python = Session([python, "-u", "-c", PYTHON], place, environment)

    def follow(self, page: Path, name: str) -> int:
        """All blocks of a page; how many were run."""
        printed, ran = "", 0
        for block in blocks(page, name):
            began = time.monotonic()
            try:
                if block.file:
                    (self.place / block.file).write_text(block.text, encoding="utf-8")
                    continue
                if "output" in block.marks:
                    if not matches(block.text, printed):
                        raise Failure(f"the page says:\n{block.text}\nbut this was printed:\n{printed}")
                    continue
                if "runnable" not in block.marks:
                    continue
                printed = self.run(block)
                ran += 1
            except Failure as failure:
                raise Failure(f"{block.place}: {failure}") from None
            print(f"{block.place}: {time.monotonic() - began:.0f} s", flush=True)
        self.shell.close()
        self.python.close()
        shutil.rmtree(self.scripts)
        return ran

    def run(self, block: Block) -> str:
        if block.language == "python":
            return self.python.run(json.dumps([block.text, block.place]))
        if " && " in block.text:
            raise Failure("a shell does not stop at a failure before &&: write two lines")
        script = self.scripts / f"{block.place.replace('/', '-').replace(':', '-')}.sh"
        script.write_text(self.shortened(block), encoding="utf-8")
        # Sourced, so that folder and variables stay; without input, so that no command eats the blocks to come.
        return self.shell.run(f"source {shlex.quote(str(script))} </dev/null; echo {shlex.quote(DONE)} $?")

    def shortened(self, block: Block) -> str:
        """The block with the three differences between a reader and this script."""
        text = block.text
        for what, instead in (
            (r"https://github\.com/convergeflow/convergeflow\b", f"{shlex.quote(str(ROOT))} convergeflow"),
            (r"make setup\b", f"ln -sfn {shlex.quote(str(FRESH))} .venv"),
            (r"--minutes \S+", f"--steps {self.steps}" if self.steps else r"\g<0>"),
        ):
            changed = re.sub(what, instead, text)
            if changed != text:
                print(f"{block.place}: {what!r} became {instead!r}")
            text = changed
        return text


def clone(place: Path) -> Path:
    """The last commit of this repository, as a stranger gets it, with the environment of the wheel."""
    target = place / "convergeflow"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(target)], check=True)
    (target / ".venv").symlink_to(FRESH)
    return target


def visit(name: str, folder: Path, fresh: Path, steps: str) -> None:
    """Follow a page as somebody who has nothing yet: a cache of their own and, if the page clones, an empty folder."""
    own = folder / name.replace("/", "-")
    own.mkdir()
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {
        "PATH": f"{FRESH / BINARIES}{os.pathsep}{os.environ['PATH']}",
        "CONVERGEFLOW_QUIET": "1",
        "CONVERGEFLOW_CACHE": str(folder / f"cache-{own.name}"),
    }
    clones = "git clone" in (fresh / name).read_text(encoding="utf-8")
    began = time.monotonic()
    ran = Reader(own if clones else fresh, environment, steps).follow(fresh / name, name)
    print(f"{name}: {ran} blocks did what the page says, {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=PAGES, help="paths from the root [default: all of the above]")
    parser.add_argument("--steps", default="20", help="`--minutes N` becomes --steps of this; empty keeps the minutes")
    parser.add_argument("--jobs", type=int, default=2, help="pages that are followed at the same time")
    options = parser.parse_args()
    if not (FRESH / BINARIES).is_dir():
        print("error: there is no environment with the wheel: run `make wheel` first", file=sys.stderr)
        return 2
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="follow-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        fresh = clone(folder)
        # A page that installs something is followed alone, behind the others.
        alone = [name for name in options.pages if "pip install" in (fresh / name).read_text(encoding="utf-8")]
        together = [name for name in options.pages if name not in alone]
        try:
            for names, jobs in ((together, options.jobs), (alone, 1)):
                with ThreadPoolExecutor(jobs) as pool:
                    for done in [pool.submit(visit, name, folder, fresh, options.steps) for name in names]:
                        done.result()
        except Failure as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
    print(f"{len(options.pages)} pages in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
