"""Recipes: YAML files with the values of a training run, and `key.sub=value` changes to them.

Here values are plain; `config.py` checks them. Naming and reading recipes loads nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from convergeflow.errors import UserError, unknown_name
from convergeflow.files import parse_yaml, read_yaml


def recipes() -> list[str]:
    """Names of the recipes in the package."""
    folder = resources.files("convergeflow") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def read_recipe(name: str) -> dict[str, Any]:
    """The raw values of a recipe by name, or of the user's own YAML file."""
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise UserError(f"no configuration file {name!r}")
        values = read_yaml(name)
    elif name in recipes():
        values = parse_yaml(_text(name))
    else:
        raise unknown_name("recipe", name, recipes())
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{name} does not hold keys and values")
    return values


def meaning_of(name: str) -> str:
    """What a recipe of the package teaches and how long it takes: its first line."""
    return _text(name).partition("\n")[0].removeprefix("# ")


def _text(name: str) -> str:
    return (resources.files("convergeflow") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """`stages.0.lr=1e-3` -> (("stages", "0", "lr"), value); the value is read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"{text!r} is not key=value (example: stages.0.steps=100)")
    try:
        return tuple(key.strip().split(".")), parse_yaml(value)
    except UserError:
        raise UserError(f"the value of {key.strip()} is not readable: {value!r}") from None


def put(values: Any, path: Sequence[str], value: Any, done: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Write `value` at `path` inside nested dicts and lists, and return the path with list entries by their number.

    A list entry goes by its number or by its `name`.
    """
    key: Any = path[0]
    where = ".".join((*done, key))
    if isinstance(values, list):
        named = [str(entry.get("name")) if isinstance(entry, dict) else "" for entry in values]
        key = named.index(key) if key in named else int(key) if key.isdigit() else -1
        if not 0 <= key < len(values):
            known = ", ".join(f"{number} ({name})" for number, name in enumerate(named))
            raise UserError(f"{where}: no such entry in {'.'.join(done)} (known: {known})")
    if len(path) == 1:
        values[key] = value
        return (*done, str(key))
    if isinstance(values, dict):
        values.setdefault(key, {})
    if not isinstance(values[key], dict | list):
        raise UserError(f"{where} is a single value and has no key {path[1]!r}")
    return put(values[key], path[1:], value, (*done, str(key)))


def leaves(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of every single value in nested dicts and lists of dicts."""
    if isinstance(values, list) and values and isinstance(values[0], Mapping):
        values = {str(number): entry for number, entry in enumerate(values)}
    if not (isinstance(values, Mapping) and values):
        yield path, values
        return
    for key, value in values.items():
        yield from leaves(value, (*path, str(key)))


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Plain values with `key.sub=value` overrides written into them."""
    for text in overrides:
        put(values, *parse_override(text))
    return values
