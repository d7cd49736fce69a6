"""Every test that docs/guarantees.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_promise_names_tests_that_exist() -> None:
    text = (ROOT / "docs/guarantees.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 30
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert all("::test_" in row for row in rows)
