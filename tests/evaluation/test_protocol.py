"""Protocols are fixed once they have a number, and the documentation names them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from convergeflow.errors import UserError
from convergeflow.evaluation.metrics import EXACT_ABOUT, METRICS, about
from convergeflow.evaluation.protocol import DEFAULT_PROTOCOL, PROTOCOLS, Protocol

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_the_documentation_says_what_the_code_does() -> None:
    rows = re.findall(r"^\| `([^`]+-\d+)` \| (.*) \| (.*) \| (.*) \| (.*) \| (.*) \|$", DOCUMENT.read_text(), re.M)
    assert [row[0] for row in rows] == list(PROTOCOLS)
    for name, first, ends, cut, dtype, entropy in rows:
        protocol = PROTOCOLS[name]
        assert first.startswith("scored") == protocol.start_token
        assert ends.startswith("all") == (protocol.ends == "all") and ("dropped" in ends) == (protocol.ends == "cut")
        assert cut == ("the scorer's context" if protocol.truncate is None else str(protocol.truncate))
        assert dtype == protocol.dtype
        assert entropy == {"ids": "generated ids", "retokenised": "the scorer's tokens"}[protocol.entropy_on]
        assert protocol.aggregate == "corpus"


def test_names_carry_a_version() -> None:
    assert DEFAULT_PROTOCOL in PROTOCOLS
    for name, protocol in PROTOCOLS.items():
        assert protocol.id == name and re.fullmatch(r"[a-z]+-\d+", name)


def test_every_metric_says_what_it_measures_with_its_unit() -> None:
    for name in [*METRICS, *EXACT_ABOUT]:
        assert re.search(r"\((nats|share|Jaccard|0 to)", about(name)), name


def test_an_impossible_protocol_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'first'"):
        Protocol("x-1", "", True, "frist", None, "float32", "ids")
