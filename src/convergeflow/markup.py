"""Words of strangers on our screens and pages: what would steer a terminal or a browser is shown, not obeyed.

Texts, names and titles may come from a tokenizer, a sample file or a record of somebody else.
"""

from __future__ import annotations

import html
import re

# Control characters but tab and line feed, and those that turn the direction of writing or hide in a line.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with every character that could steer a terminal written as its number, as in \\x1b."""
    return _STEERING.sub(_number, text)


def _number(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def in_json(text: str) -> str:
    """A JSON text with such characters as JSON writes them, which changes no value."""
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def in_page(text: str) -> str:
    """A single line for a page of Markdown: no HTML, no links, no line breaks, nothing that steers."""
    line = " ".join(printable(text).split())
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", html.escape(line, quote=False))
