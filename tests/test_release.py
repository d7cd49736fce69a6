"""What a release promises: one version everywhere, one address, and workflows that call what anyone can call."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_one_version() -> None:
    assert CITATION["version"] == PROJECT["version"]
    first = re.search(r"^## (\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert first is not None and first[1] == PROJECT["version"]
    assert first[2] in ("unreleased", CITATION["date-released"])


def test_one_address() -> None:
    address = PROJECT["urls"]["Source"]
    assert CITATION["repository-code"] == PROJECT["urls"]["Homepage"] == address
    assert all(url.startswith((address, "https://convergeflow.github.io/")) for url in PROJECT["urls"].values())
    assert f"git clone {address}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_pythons_that_are_named_are_tested() -> None:
    named = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", text)}
    ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert named == set(re.findall(r'python(?:-version)?: "(3\.\d+)"', ci))
    assert min(named, key=lambda name: int(name.split(".")[1])) == PROJECT["requires-python"].removeprefix(">=")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_what_anyone_can_call(workflow: Path) -> None:
    steps = set(re.findall(r"[a-z]+", re.search(r"no such step: \$step \((.+?)\)", (ROOT / ".ci/run").read_text())[1]))  # type: ignore[index]
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        first, *rest = command.split()
        assert first == ".ci/run" and set(rest) <= steps, command


def test_nothing_publishes_but_a_tag() -> None:
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    assert release["permissions"] == {"contents": "read"}
    assert release["jobs"]["pypi"]["permissions"] == {"id-token": "write"}
    assert "password" not in (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8").replace(
        "there is no password", ""
    )


def test_the_page_on_pypi_has_whole_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, str] = {}
    monkeypatch.setitem(sys.modules, "setuptools", SimpleNamespace(setup=told.update))
    runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")
    page = told["long_description"]
    assert "readme" in PROJECT["dynamic"] and told["long_description_content_type"] == "text/markdown"
    source = "https://github.com/convergeflow/convergeflow/blob/main/"
    raw = "https://raw.githubusercontent.com/convergeflow/convergeflow/main/"
    assert f"]({raw}docs/images/flow.svg)" in page
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert len(links) > 20 and all(link.startswith("https://") for link in links)
    for link in links:
        if link.startswith((source, raw)):
            assert (ROOT / link.removeprefix(source).removeprefix(raw).partition("#")[0]).exists(), link
