"""More of test_by_heart.py, in a file of its own so that several processes share the work."""

from __future__ import annotations

import pytest
from lessons import PARTS, check_by_heart


@pytest.mark.parametrize("name", PARTS[1])
def test_learns_ten_sentences_by_heart(name: str) -> None:
    check_by_heart(name)
