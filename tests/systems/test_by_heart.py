"""The proof that every rival can learn: ten sentences by heart. More in test_by_heart_2.py and _3.py."""

from __future__ import annotations

import pytest
from lessons import LESSONS, PARTS, check_by_heart

from convergeflow.systems import rivals


def test_every_rival_has_a_lesson() -> None:
    assert set(LESSONS) == set(rivals())
    assert sorted(name for part in PARTS for name in part) == sorted(LESSONS)


@pytest.mark.parametrize("name", PARTS[0])
def test_learns_ten_sentences_by_heart(name: str) -> None:
    check_by_heart(name)
