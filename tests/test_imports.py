"""Guard rails of the architecture, read from the syntax tree: nothing here runs the package.

Imports point one way, accelerators are named in one file, nothing unpickles, and no room is a drawer for odd things.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "convergeflow"
FILES = sorted(SOURCE.rglob("*.py"))

LEAVES = {"errors", "kinds", "markup", "randomness", "device", "files", "plugins", "data"}
CORE = LEAVES | {"flow", "model"}
METHOD = CORE | {"objective", "sampling"}
SYSTEMS = METHOD | {"systems"}
LEARNED = SYSTEMS | {"training", "zoo"}
MEASURED = LEARNED | {"evaluation", "results"}
MAY_IMPORT = {
    "errors": set(),
    "kinds": {"errors"},
    "markup": set(),
    "randomness": {"errors"},
    "device": {"errors"},
    "files": {"errors"},
    "plugins": {"errors"},
    "data": {"errors", "randomness", "files", "plugins", "markup"},
    "flow": {"errors", "kinds", "randomness", "plugins"},
    "model": LEAVES | {"flow"},
    "objective": CORE,
    "sampling": CORE,
    "systems": METHOD,
    "paper": set(),
    "training": SYSTEMS,
    "zoo": SYSTEMS | {"training"},
    "distillation": LEARNED,
    "interop": LEARNED | {"__init__"},
    "evaluation": LEARNED | {"__init__"},
    "results": MEASURED - {"results"} | {"__init__"},
    "studies": MEASURED | {"__init__"},
    "benchmarks": LEARNED | {"evaluation", "__init__"},
    "serving": MEASURED | {"__init__"},
    "cli": MEASURED | {"distillation", "interop", "studies", "benchmarks", "serving", "__init__"},
    "__main__": {"cli"},
    "__init__": MEASURED | {"interop"},
}
"""Room -> the other rooms it may import. A room is a file or a folder directly under the package."""


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def module_of(file: Path) -> str:
    parts = ["convergeflow", *file.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file) for file in FILES}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported_modules(file: Path, *, at_import_time: bool = False) -> Iterator[tuple[int, str]]:
    """(line, module of ours) for every import in a file, or only for those that run when the file is imported."""
    tree = tree_of(file)
    for node in tree.body if at_import_time else ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "convergeflow":
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write the whole module name"
            if node.module and node.module.split(".")[0] == "convergeflow":
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield node.lineno, full if full in MODULES else node.module


def test_every_room_is_known() -> None:
    assert {room_of(module) for module in MODULES} <= set(MAY_IMPORT), "add the new room to MAY_IMPORT"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_point_one_way(file: Path) -> None:
    room = room_of(module_of(file))
    for line, module in imported_modules(file):
        target = room_of(module)
        assert target == room or target in MAY_IMPORT[room], f"{file}:{line}: {room} may not import {target}"


def test_no_import_cycles() -> None:
    # A registry may import its entries when it is asked for them; what counts is the moment of import.
    graph = {
        module_of(file): {module for _, module in imported_modules(file, at_import_time=True)} - {module_of(file)}
        for file in FILES
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, "import cycle: " + " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for target in sorted(graph.get(module, ())):
                visit(target, (*trail, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def docstrings(tree: ast.Module) -> set[int]:
    """The nodes that only explain: docstrings, and strings that stand alone behind a name."""
    return {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_accelerators_are_named_in_one_file(file: Path) -> None:
    if file.name == "device.py":
        return
    tree = tree_of(file)
    explanations = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in explanations:
            # A help text may mention an accelerator; a string that is a device, or looks for one, may not.
            named = re.fullmatch(r"(cuda|mps)(:\d*)?", node.value.strip().lower()) is not None
        else:
            named = isinstance(node, ast.Attribute) and node.attr in ("cuda", "mps")
        assert not named, f"{file}:{getattr(node, 'lineno', '?')}: only device.py names an accelerator"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_nothing_unpickles(file: Path) -> None:
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            assert not banned & {alias.name.split(".")[0] for alias in node.names}, f"{file}:{node.lineno}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.module.split(".")[0] not in banned, f"{file}:{node.lineno}"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            where = f"{file}:{node.lineno}: {name}"
            assert name != "torch.save", f"{where}: weights are written as safetensors"
            assert not name.endswith("read_pickle"), where
            if name == "torch.load":
                assert options.get("weights_only") == "True", f"{where} needs weights_only=True"
            assert options.get("allow_pickle", "False") == "False", where


# What transformers and lm_eval call by name on a model.
FOREIGN_NAMES = {"get_input_embeddings", "get_output_embeddings", "get_model_info"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_names_say_what_things_are(file: Path) -> None:
    for part in file.relative_to(SOURCE).with_suffix("").parts:
        assert part.strip("_") not in {"utils", "util", "helpers", "helper", "common", "misc", "manager"}, file
    tree = tree_of(file)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name not in FOREIGN_NAMES:
            vague = node.name.lstrip("_").startswith(("get_", "do_", "process_", "maybe_"))
            assert not vague, f"{file}:{node.lineno}: {node.name} does not say what it does"
    if tree.body and file.name != "__init__.py":
        explanation = ast.get_docstring(tree)
        assert explanation, f"{file}: say in the first lines what this room is for"
