"""The flags of every command are a promise: they change when `flags.txt` is changed with them, and not otherwise.

After a deliberate change write the file again with `python tests/cli/test_flags.py`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from convergeflow.cli.main import build

FILE = Path(__file__).with_name("flags.txt")
SOURCE = Path(__file__).parents[2] / "src" / "convergeflow"


def commands(command: Any, path: str) -> dict[str, Any]:
    """Every command and part of a command by the words that name it."""
    found = {path: command}
    for word, part in getattr(command, "commands", {}).items():
        found |= commands(part, f"{path} {word}")
    return found


ALL = commands(build(), "convergeflow")


def listed() -> str:
    """One command a paragraph: its arguments, then its flags in the order of its help."""
    paragraphs = []
    for path, command in ALL.items():
        lines = [
            f"  {name}"
            for parameter in command.params
            for name in [", ".join([*parameter.opts, *getattr(parameter, "secondary_opts", [])])]
        ]
        paragraphs.append("\n".join([path, *lines]))
    return "\n\n".join(paragraphs) + "\n"


def test_the_flags_are_those_that_were_agreed() -> None:
    assert listed() == FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", ALL)
def test_help_begins_with_a_whole_sentence(path: str) -> None:
    first = (ALL[path].help or "").split("\n\n")[0]
    assert first and first[0].isupper() and first.rstrip().endswith(".")
    if path != "convergeflow":
        assert ALL[path].get_short_help_str(10) == " ".join(first.split()), "a list of commands cuts it"


@pytest.mark.parametrize("path", ALL)
def test_placeholders_are_in_capitals(path: str) -> None:
    usage = ALL[path].get_usage(typer.Context(ALL[path], info_name=path))
    assert not re.search(r"[\[{][a-z_]+[\]}]|\[\[", usage), usage


FLAGS = {
    name for command in ALL.values() for parameter in command.params for name in parameter.opts if name[:2] == "--"
}


@pytest.mark.parametrize(
    "file",
    [file for file in sorted(SOURCE.rglob("*.py")) if "cli" not in file.relative_to(SOURCE).parts],
    ids=lambda file: str(file.relative_to(SOURCE)),
)
def test_no_flag_is_named_below_the_command_line(file: Path) -> None:
    """A room below knows settings. The command line alone knows what their flags are called."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A whole command that the user can copy, in words such as "convergeflow fetch sotu --force", is no setting.
            text = re.sub(r"convergeflow [a-z]+( [^\s,;`]+)*", "", node.value)
            named = {flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text) if flag in FLAGS}
            assert not named, f"{file}:{node.lineno}: write {named} as a setting in backticks"


if __name__ == "__main__":
    FILE.write_text(listed(), encoding="utf-8")
