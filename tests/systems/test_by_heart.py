"""The proof that every rival can learn: ten sentences by heart. The other half is in test_by_heart_rest.py."""

from __future__ import annotations

import pytest
from lessons import LESSONS, check_by_heart

from convergeflow.systems import rivals

HERE = ("elf", "plaid", "ar", "mdlm", "langflow")


def test_every_rival_has_a_lesson() -> None:
    assert set(LESSONS) == set(rivals()) >= set(HERE)


@pytest.mark.parametrize("name", HERE)
def test_learns_ten_sentences_by_heart(name: str) -> None:
    check_by_heart(name)
