"""Build the documentation site into build/site: without a warning, and without a word to another host.

The pages are those of docs/, as they are read in the repository. A copy is made in build/docs, in which

- README.md of a folder is its index page, and the changelog and other files of the root are pages too,
- a link to a file outside docs/ leads to a copy of that file, and a link to a folder to a list of its files,
- the reference of the Python interface and of the commands is written, from docstrings and from help texts.

Zensical makes the site of it in strict mode. It reads zensical.toml, which also holds the order of the pages.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
LINK = re.compile(r"(\]\(|<img src=\")([^)#\s\"]+)")
FENCE = re.compile(r"^(```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)
SHOWN = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".cff": "yaml"}
"""Files outside docs/ that become pages of code; others are copied."""
GENERATED = ("reference/python.md", "reference/commands.md")


def place(file: Path) -> PurePosixPath:
    """Where a file or folder of the repository stands in the site's source."""
    if file.is_dir():
        return place(file / "README.md")
    if file.is_relative_to(DOCS):
        inside = PurePosixPath(file.relative_to(DOCS).as_posix())
        return inside.with_name("index.md") if inside.name == "README.md" else inside
    outside = PurePosixPath(file.relative_to(ROOT).as_posix())
    if outside.suffix == ".md" and len(outside.parts) == 1:
        return PurePosixPath(outside.name.lower())
    return PurePosixPath("source", f"{outside}.md" if outside.suffix in SHOWN else outside)


class Staging:
    """The pages, and whatever they link to, on their way into build/docs."""

    def __init__(self) -> None:
        self.done: set[Path] = set()

    def take(self, file: Path) -> None:
        """Copy a file once, with all that it links to."""
        file = file.resolve()
        if file in self.done:
            return
        self.done.add(file)
        target = PAGES / place(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            self.take_folder(file, target)
        elif file.suffix == ".md":
            target.write_text(self.rewritten(file), encoding="utf-8")
        elif file.suffix in SHOWN and not file.is_relative_to(DOCS):
            name = file.relative_to(ROOT).as_posix()
            code = file.read_text(encoding="utf-8")
            target.write_text(f"# {name}\n\n````{SHOWN[file.suffix]}\n{code}````\n", encoding="utf-8")
        else:
            shutil.copyfile(file, target)

    def take_folder(self, folder: Path, target: Path) -> None:
        """A list of the files of a folder without a page of its own."""
        if (folder / "README.md").is_file():
            return self.take(folder / "README.md")
        files = sorted(path for path in folder.iterdir() if path.is_file())
        for file in files:
            self.take(file)
        name = folder.relative_to(ROOT).as_posix()
        lines = [f"# {name}", "", *(f"- [{file.name}]({file.name})" for file in files)]
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def rewritten(self, page: Path) -> str:
        """The text with its links as they are in the site, and without the marks of runnable blocks."""
        parts = FENCE.split(page.read_text(encoding="utf-8"))
        here = place(page).parent

        def change(found: re.Match[str]) -> str:
            goal = (page.parent / found[2]).resolve()
            if "://" in found[2] or not goal.exists() or not goal.is_relative_to(ROOT):
                return found[0]
            self.take(goal)
            return found[1] + os.path.relpath(place(goal), here).replace(os.sep, "/")

        return "".join(
            re.sub(r"\A```(\S+).*", r"```\1", part) if part.startswith("```") else LINK.sub(change, part)
            for part in parts
        )


def python_reference() -> str:
    """Every public name where it lives, for mkdocstrings to fill in."""
    import convergeflow as cf

    homes: dict[str, str] = cf._HOMES
    functions = [name for name in cf.__all__ if name[0].islower()]
    classes = sorted(name for name in cf.__all__ if name[0].isupper())
    text = [
        "# Python reference",
        "",
        "Every name of `import convergeflow as cf`, written from the code. [The Python interface](../api.md) explains "
        "them with examples.",
        "",
        "## Functions",
        "",
        *(f"::: convergeflow.{name}\n" for name in functions),
        "## Classes",
        "",
        *(f"::: convergeflow.{homes.get(name, 'errors')}.{name}\n" for name in classes),
    ]
    return "\n".join(text)


def command_reference() -> str:
    """What `--help` says of every command and of its parts."""
    from convergeflow.cli import main as command_line

    os.environ["COLUMNS"] = "100"

    def said(*words: str) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert command_line.main([*words, "--help"]) == 0, words
        return out.getvalue().strip()

    text = ["# Commands", "", "What `--help` says, written from the program.", "", f"```text\n{said()}\n```", ""]
    for word in command_line.COMMANDS:
        help_text = said(word)
        text += [f"## {word}", "", f"```text\n{help_text}\n```", ""]
        parts = re.search(r"^Commands:\n((?:  .*\n?)+)", help_text, re.MULTILINE)
        for part in re.findall(r"^  ([a-z][\w-]*)", parts[1], re.MULTILINE) if parts else ():
            text += [f"### {word} {part}", "", f"```text\n{said(word, part)}\n```", ""]
    return "\n".join(text)


def stage() -> None:
    """build/docs, new."""
    shutil.rmtree(PAGES, ignore_errors=True)
    staging = Staging()
    root = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "src/convergeflow/paper.py")]
    for file in sorted([*DOCS.rglob("*.md"), *DOCS.rglob("*.css"), *root]):
        staging.take(file)
    for name, text in zip(GENERATED, (python_reference(), command_reference()), strict=True):
        (PAGES / name).parent.mkdir(exist_ok=True)
        (PAGES / name).write_text(text, encoding="utf-8")


def listed(nav: Any) -> Iterator[str]:
    """All pages of the navigation."""
    for entry in nav:
        values = entry.values() if isinstance(entry, dict) else [entry]
        for value in values:
            if isinstance(value, str):
                yield value
            else:
                yield from listed(value)


def navigation() -> list[str]:
    """The pages of zensical.toml in their order."""
    return list(listed(tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]))


class Loads(HTMLParser):
    """What a page loads by itself, as a browser does; where its links lead; and the places that links can lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.places |= {str(given[name]) for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        if tag == "link" and given.get("rel") in ("canonical", "next", "prev", "alternate"):
            return
        names = {"link": ["href"], "a": [], "form": ["action"]}.get(tag, ["src", "srcset", "data", "poster", "href"])
        self.found += [str(given[name]) for name in names if given.get(name)]
        self.found += re.findall(r"url\(([^)]+)\)", given.get("style") or "")


def other_hosts(site: Path) -> list[str]:
    """Every place of a built site from which a browser would load something of another host."""
    wrong = []
    for file in sorted(site.rglob("*")):
        if file.suffix == ".html":
            text = file.read_text(encoding="utf-8")
            found = Loads(text).found + re.findall(
                r"url\([\"']?([^)\"']+)", "".join(re.findall(r"<style.*?</style>", text, re.S))
            )
        elif file.suffix == ".css":
            found = re.findall(r"(?:url\(|@import )[\"']?([^)\"';]+)", file.read_text(encoding="utf-8"))
        else:
            continue
        wrong += [f"{file.relative_to(site)}: {each}" for each in found if urlsplit(each.strip("\"' ")).netloc]
    return wrong


def dead_links(site: Path) -> list[str]:
    """Links of a built site to files, or to places in them, that are not there."""
    pages = {file.resolve(): Loads(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    wrong = []
    for file, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme or address.netloc or file.name == "404.html":
                continue
            goal = (file.parent / unquote(address.path)).resolve() if address.path else file
            goal = goal / "index.html" if goal.is_dir() else goal
            there = goal.is_file() and (goal not in pages or unquote(address.fragment) in pages[goal].places)
            if not there:
                wrong.append(f"{file.relative_to(site.resolve())}: {link}")
    return wrong


def main() -> int:
    stage()
    shutil.rmtree(SITE, ignore_errors=True)
    done = subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=ROOT)
    if done.returncode:
        return done.returncode
    wrong = [f"another host: {each}" for each in other_hosts(SITE)] + [
        f"a dead link: {each}" for each in dead_links(SITE)
    ]
    for each in wrong:
        print(f"error: {each}", file=sys.stderr)
    files = [file for file in SITE.rglob("*") if file.is_file()]
    pages = sum(file.suffix == ".html" for file in files)
    print(f"build/site: {pages} pages, {sum(file.stat().st_size for file in files) / 1e6:.0f} MB")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
