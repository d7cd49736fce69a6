"""The documentation tells the truth: its files exist, its names are in them, its commands run.

A fenced block marked `bash runnable` is run line by line in an empty folder; the README, the start page and the
tutorials are followed as a whole by `make tutorials` instead. The options of every other command line are looked up in
that command's help, so that a renamed option cannot survive in the text.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import convergeflow
from convergeflow.cli import main as command_line

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "convergeflow"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
BLOCK = re.compile(r"^```(\S*)[ ]?(.*?)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def identify(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(page: Path, *, runnable: bool) -> Iterator[str]:
    """The command lines of a page's bash blocks, without comments."""
    for language, marks, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "bash" and ("runnable" in marks.split()) == runnable:
            for line in body.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield shlex.join(words)


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{identify(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_files_named_in_the_text_exist(page: Path) -> None:
    """`flow/path.py`, `tests/golden`, `docs/notation.md`: relative to the package or to the repository."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for name in re.findall(r"`([\w./-]+/[\w.-]*|[\w-]+\.(?:py|md|txt|toml|yaml))`", text):
        if name.startswith((".venv", "models/", "runs/", "owner/")):
            continue  # made by the user
        places = (ROOT / name, SOURCE / name)
        assert any(place.exists() for place in places), f"{identify(page)} names {name}"


def test_notation_names_are_in_their_files() -> None:
    rows = 0
    for line in (ROOT / "docs" / "notation.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) != 5 or not cells[3].startswith("`"):
            continue
        rows += 1
        code = (SOURCE / cells[3].strip("`")).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", cells[2]):
            for part in name.split("."):
                assert re.search(rf"\b{part}\b", code), f"{name} is not in {cells[3]}"
    assert rows > 30


def test_every_equation_has_a_place_and_its_names_are_there() -> None:
    """Sections 2 and 3 have Eqs. 1 to 32; `name` in `file` is looked up in the file, the page's names in paper.py."""
    page = (SOURCE / "paper.py").read_text(encoding="utf-8")
    found: list[int] = []
    for line in (ROOT / "docs" / "notation.md").read_text(encoding="utf-8").splitlines():
        row = re.fullmatch(r"\| ([\d, ]+) \| (.+) \| (.+) \| (.+) \|", line)
        if row is None:
            continue
        found += [int(number) for number in row[1].split(",")]
        for name in re.findall(r"`(\w+)`", row[3]):
            assert re.search(rf"^def {name}\b", page, re.MULTILINE), f"Eqs. {row[1]}: {name} is not in paper.py"
        places = re.findall(r"`([\w.]+)` in `([\w/.]+)`", row[4])
        assert places or row[4].startswith("-"), line
        for name, file in places:
            code = (SOURCE / file).read_text(encoding="utf-8")
            for part in name.split("."):
                defined = rf"^\s*(class|def) {part}\b|^\s*{part}\b\s*[:=]"
                assert re.search(defined, code, re.MULTILINE), f"Eqs. {row[1]}: {name} is not defined in {file}"
    assert sorted(found) == list(range(1, 33))


def test_the_reading_order_has_all_rooms_with_their_size() -> None:
    """A size may be a tenth off, so that the page need not change with every line."""
    text = (ROOT / "docs" / "reading-order.md").read_text(encoding="utf-8")
    said = {
        name.strip("`/"): int(lines) for name, lines in re.findall(r"^\| (\S+|single files) \| (\d+) \|", text, re.M)
    }
    real: dict[str, int] = {}
    for file in SOURCE.rglob("*.py"):
        room = file.relative_to(SOURCE).parts[0]
        room = room if room in ("paper.py", "__init__.py") or not room.endswith(".py") else "single files"
        real[room] = real.get(room, 0) + len(file.read_text(encoding="utf-8").splitlines())
    assert said.keys() == real.keys()
    off = {room: lines for room, lines in real.items() if abs(said[room] - lines) > 0.1 * lines}
    assert not off, f"docs/reading-order.md: put these numbers in: {off}"


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_python_in_the_text_imports_what_exists(page: Path) -> None:
    for language, _, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("convergeflow"):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cf":
                assert node.attr in convergeflow.__all__, f"{identify(page)} uses cf.{node.attr}"


def test_the_readme_says_in_python_what_it_prints() -> None:
    blocks = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    first = next(n for n, (language, _, _) in enumerate(blocks) if language == "python")
    assert "import convergeflow as cf" in blocks[first][2]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(blocks[first][2], "README.md", "exec"), {})
    language, marks, shown = blocks[first + 1]
    assert (language, marks) == ("text", "output")
    assert " ".join(printed.getvalue().split()).startswith(" ".join(shown.split()).removesuffix(" ..."))


def test_the_readme_shows_the_two_commands() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shown = list(commands(ROOT / "README.md", runnable=False))
    assert "make demo" in shown
    assert "make test" in shown
    for line in shown:
        if line.startswith("make "):
            for target in line.split()[1:]:
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), line


def described_options(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The help of the command that `words` call, with its part where it has parts."""
    path = words[:1]
    assert command_line.main([*path, "--help"]) == 0, path
    text = capsys.readouterr().out
    if "Commands:" in text and len(words) > 1 and not words[1].startswith("-"):
        assert command_line.main([*words[:2], "--help"]) == 0, words
        text = capsys.readouterr().out
    return text


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_commands_in_the_text_exist_with_their_options(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [*commands(page, runnable=False), *commands(page, runnable=True)]
    for line in lines:
        words = shlex.split(line)
        if "convergeflow" not in words[:4]:
            continue
        words = words[words.index("convergeflow") + 1 :]
        if not words or words[0].startswith("-"):
            continue
        text = described_options(words, capsys)
        for word in words:
            if re.match(r"--[a-z]", word):
                option = word.split("=")[0]
                assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), f"{identify(page)}: {line}: {option}"


FOLLOWED = {ROOT / name for name in ("README.md", "docs/index.md", "docs/own-text.md")}
FOLLOWED |= set((ROOT / "docs" / "tutorials").glob("*.md"))
RUNNABLE = [(page, line) for page in PAGES if page not in FOLLOWED for line in commands(page, runnable=True)]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for a page's commands, because later ones use what earlier ones made."""
    return tmp_path_factory.mktemp("readme")


@pytest.mark.parametrize(("page", "line"), RUNNABLE, ids=[f"{identify(page)}: {line}" for page, line in RUNNABLE])
def test_runnable_commands_run(page: Path, line: str, workplace: Path) -> None:
    place = workplace / page.stem
    place.mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "CONVERGEFLOW_QUIET": "1", "CONVERGEFLOW_CACHE": str(place / "cache")}
    done = subprocess.run(
        line, shell=True, cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
