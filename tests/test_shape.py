"""The code stays readable: no long files, no tangled functions, no class with a drawer of state."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from radon.complexity import cc_visit

SOURCE = Path(__file__).resolve().parent.parent / "src" / "convergeflow"
FILES = sorted(SOURCE.rglob("*.py"))
LONG = {"model/fused.py"}
"""The tiled head is one algorithm."""
CORE = ("flow", "model", "objective", "sampling", "systems/convergeflow.py")
"""What a reader of the paper has to read; without `FAST`."""
FAST = {"model/fused.py", "model/accelerated.py", "model/triton_head.py"}
"""How the head is fast, not what it means."""


def name_of(file: Path) -> str:
    return file.relative_to(SOURCE).as_posix()


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_functions_and_classes_are_small(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert name_of(file) in LONG or len(text.splitlines()) <= 500, "does the file still have one job?"
    tangled = [f"{block.name}: {block.complexity}" for block in cc_visit(text) if block.complexity > 20]
    assert not tangled
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            kept = mutable_attributes(node)
            assert len(kept) <= 10, f"{node.name} keeps {sorted(kept)}"


def mutable_attributes(cls: ast.ClassDef) -> set[str]:
    """What methods assign on self; a frozen dataclass has none."""
    return {
        target.attr
        for method in cls.body
        if isinstance(method, ast.FunctionDef)
        for node in ast.walk(method)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        for whole in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in ast.walk(whole)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }


def test_the_core_can_be_read_in_an_afternoon() -> None:
    # A ceiling that is only ever lowered.
    files = [file for file in FILES if name_of(file).startswith(CORE) and name_of(file) not in FAST]
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 3500


def test_a_name_means_one_class() -> None:
    names = [
        node.name
        for file in FILES
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert not {name for name in names if names.count(name) > 1}
