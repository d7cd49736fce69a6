"""Replays: a recording and the page's own panels in one HTML file that plays from disk and asks no host for anything.

The modules of the page are joined in the order of their imports. The file's content-security policy allows exactly
this script and this style; the recording is data, and no text of it is ever read as markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

RECORDING = "{{recording}}"
"""What stands for the recording in a template."""

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.MULTILINE)


def asset(name: str) -> str:
    """A file of the page."""
    return (resources.files("convergeflow.serving") / "page" / name).read_text(encoding="utf-8")


def joined(entry: str) -> str:
    """A module and everything it imports as one script; names are unique among the page's modules."""
    done: dict[str, str] = {}

    def visit(name: str) -> None:
        text = asset(name)
        for found in _IMPORT.finditer(text):
            if found[1] not in done:
                visit(found[1])
        done[name] = re.sub(r"^export ", "", _IMPORT.sub("", text), flags=re.MULTILINE)

    visit(entry)
    return "\n".join(done.values())


def _allowed(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


@cache
def template() -> str:
    """A replay without its recording."""
    script, style = joined("replay.js"), asset("style.css")
    assert "</script" not in script and "</style" not in style
    policy = (
        f"default-src 'none'; script-src {_allowed(script)}; style-src {_allowed(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "style": style, "script": script}
    return re.sub(r"\{\{(policy|style|script)\}\}", lambda found: parts[found[1]], asset("replay.html"))


def as_data(recording: Mapping[str, Any]) -> str:
    """JSON that can stand inside a script element: no text in it can end the element."""
    text = json.dumps(recording, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def replay(recording: Mapping[str, Any], title: str) -> str:
    """One HTML file with everything in it."""
    before, after = template().replace("{{title}}", html.escape(title)).split(RECORDING)
    return before + as_data(recording) + after
