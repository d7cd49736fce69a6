"""Replays: one file, no outside host, and no text in it is ever read as markup."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from convergeflow.serving.replay import asset, joined, replay

PAGE = Path(__file__).parents[2] / "src" / "convergeflow" / "serving" / "page"
NASTY = "</script><script>alert(1)</script><!-- \u2028 & \" ' <b>"


def recorded(html: str) -> dict[str, object]:
    """What a browser would find in the element with the recording: everything up to the first end tag."""
    found = re.search(r'<script type="application/json" id="recording">(.*?)</script', html, re.DOTALL | re.IGNORECASE)
    assert found is not None
    return dict(json.loads(found[1]))


def test_text_cannot_leave_its_element() -> None:
    html = replay({"samples": [{"text": NASTY}], "words": {"1": NASTY}}, NASTY)
    assert recorded(html)["samples"] == [{"text": NASTY}]
    assert (
        html.lower().count("</script>") == 2 and "alert(1)</script>" not in html.replace("&lt;", "<").split("<body>")[1]
    )
    assert "<title>A flow converging: &lt;/script&gt;" in html


def test_a_replay_names_no_host_and_allows_only_its_own_script() -> None:
    html = replay({"samples": []}, "x")
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", html))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "a namespace is a name, not a place"
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None and "default-src 'none'" in policy[1] and "unsafe" not in policy[1]
    assert not re.search(r"(src|href)=\"(?!data:,)", html)


def test_no_module_builds_markup_from_text() -> None:
    for file in PAGE.glob("*.js"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            file
        )


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed: it checks the joined script's syntax")
@pytest.mark.parametrize("entry", ["replay.js", "main.js"])
def test_the_modules_join_to_one_script(entry: str, tmp_path: Path) -> None:
    file = tmp_path / "joined.mjs"
    file.write_text(joined(entry), encoding="utf-8")
    done = subprocess.run(["node", "--check", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # a name that two modules declare is a syntax error here
    assert not re.search(r"^(import|export) ", file.read_text(encoding="utf-8"), re.MULTILINE)


def test_assets_are_files_of_the_page_only() -> None:
    assert asset("style.css").startswith(":root")
