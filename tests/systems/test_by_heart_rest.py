"""The second half of test_by_heart.py, in a file of its own so that two processes share the work."""

from __future__ import annotations

import pytest
from lessons import LESSONS, check_by_heart

FIRST_HALF = ("elf", "plaid", "ar", "mdlm", "langflow")


@pytest.mark.parametrize("name", [name for name in LESSONS if name not in FIRST_HALF])
def test_learns_ten_sentences_by_heart(name: str) -> None:
    check_by_heart(name)
