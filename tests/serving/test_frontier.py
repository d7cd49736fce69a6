"""The frontier of the page is that of the committed records."""

from __future__ import annotations

import json
from pathlib import Path

from convergeflow.serving.frontier import frontiers
from convergeflow.serving.replay import asset

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_the_shipped_frontier_is_made_of_the_committed_records() -> None:
    shipped = json.loads(asset("frontier.json"))
    assert shipped == json.loads(json.dumps(frontiers(RESULTS)))
    sharp = json.loads((RESULTS / "stories-small/sharp.json").read_text(encoding="utf-8"))
    ours = [point for point in shipped["stories"]["points"] if point["record"].endswith("stories-small/sharp.json")]
    assert [point["gen_ppl"] for point in ours] == [float(f"{sharp['gen_ppl']:.4g}")]
    assert {point["curve"] for point in shipped["stories"]["points"]} >= {"stories-small", "ar", "mdlm", "convergeflow"}
    # One curve is one training: second seeds are for errors.
    assert not [point for corpus in shipped.values() for point in corpus["points"] if "@" in point["record"]]
    assert {point["curve"] for point in shipped["basic"]["points"]} >= {
        "basic-small",
        "ar",
        "mdlm",
        "duo",
        "convergeflow",
    }
