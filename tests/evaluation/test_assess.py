"""From samples to a record: the numbers are those of the parts, and nothing that is needed again is missing."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import scorer_stand_ins as stand_ins
from tiny_model import word_model, word_shares

from convergeflow.data.stories import stories_law
from convergeflow.data.tokenizer import stories_tokenizer
from convergeflow.errors import UserError
from convergeflow.evaluation.assess import Assessor, SampleSet, likelihood_of
from convergeflow.evaluation.protocol import PROTOCOLS
from convergeflow.evaluation.reference import stories_reference
from convergeflow.evaluation.scorers import ExactScorer
from convergeflow.results import record as record_room
from convergeflow.results.record import check_comparable, commit_of, make, render


def sample_set(ids: np.ndarray) -> SampleSet:  # type: ignore[type-arg]
    num = len(ids)
    return SampleSet(
        ids, list(range(5, 5 + num)), [8] * num, {"nfe": 8}, {"name": "m", "weights": "w"}, stories_tokenizer()
    )


@pytest.fixture(scope="module")
def assessor() -> Assessor:
    return Assessor(ExactScorer(), stories_reference(24, 20))


def test_record_of_real_stories_has_the_law_s_own_numbers(assessor: Assessor) -> None:
    law = stories_law()
    ids = law.sample(np.random.default_rng(1), 24, 20)
    record = make(assessor.assess(sample_set(ids), PROTOCOLS["ours-1"]), command="convergeflow evaluate m")
    assert record["gen_ppl"] == pytest.approx(math.exp(law.smoothed_nll(ids).mean() / 20))
    assert record["valid"] == 1.0 and record["n"] == 24 and record["nfe"] == 8 and record["protocol"] == "ours-1"
    assert record["seeds"] == {"first": 5, "count": 24}
    assert record["corpus"]["fingerprint"].startswith("law-") and record["command"] == "convergeflow evaluate m"
    assert record["real"]["gen_ppl"] == pytest.approx(record["gen_ppl"], abs=6 * record["gen_ppl_se"])
    assert record["real"]["valid"] == 1.0 and record["versions"]["torch"]
    assert len(record["per_sample"]["nll"]) == 24
    for name, row in record["metrics"].items():
        assert {"value", "se", "n", "real", "real_se"} <= set(row), name
    json.dumps(record, allow_nan=False)


def test_a_record_names_the_commit_of_a_clone_and_of_nothing_else(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    kept, installed = tmp_path / "kept.py", tmp_path / "environment.py"
    kept.write_text("")
    assert commit_of(kept) is None
    git("init", "-q")
    git("add", "kept.py")
    git("commit", "-q", "-m", "first")
    commit_of.cache_clear()
    head = git("rev-parse", "HEAD")[:12]
    installed.write_text("")
    assert commit_of(kept) == head and commit_of(installed) is None
    kept.write_text("changed")
    commit_of.cache_clear()
    assert commit_of(kept) == f"{head}-dirty"
    commit = make({}, command=None)["versions"].get("commit")
    assert commit == commit_of(Path(record_room.__file__))


def test_an_unreadable_sampler_scores_worse_and_the_record_says_where(assessor: Assessor) -> None:
    law = stories_law()
    words = np.random.default_rng(0).choice(len(law.vocabulary), (24, 20), p=word_shares())
    record = assessor.assess(sample_set(words), PROTOCOLS["ours-1"])
    assert record["gen_ppl"] > 20 * record["real"]["gen_ppl"] and record["valid"] == 0.0
    assert record["metrics"]["clean_nll"]["value"] is None  # no valid sample, no clean NLL
    text = render(record)
    for expected in ("Gen. PPL", "valid samples", "real text", "js_2", "fingerprint law-", "seeds"):
        assert expected in text


def test_protocols_are_put_side_by_side() -> None:
    assessor = Assessor(stand_ins.bigram_scorer(), stories_reference(6, 60))
    drawn = sample_set(stories_law().sample(np.random.default_rng(2), 6, 60))
    records = [assessor.assess(drawn, PROTOCOLS[name]) for name in ("ours-1", "duo-2026", "elf-2026")]
    ours, duo, elf = records
    ends = int((drawn.ids == 0).sum())
    assert ours["scored_tokens"] == 6 * 60
    assert duo["scored_tokens"] == 6 * 59 - (ends - int(((drawn.ids == 0).sum(1) > 0).sum()))
    assert elf["scored_tokens"] < duo["scored_tokens"]
    assert elf["entropy"] < ours["entropy"] == duo["entropy"]  # shorter texts have fewer words
    text = render({"records": records})
    assert "elf-2026" in text and "%" in text
    with pytest.raises(UserError, match="protocol: ours-1 and duo-2026"):
        check_comparable([ours, duo])
    check_comparable([ours, ours])
    other = {**ours, "corpus": {"fingerprint": "another"}}
    with pytest.raises(UserError, match="different things"):
        check_comparable([ours, other])


def test_likelihood_in_the_record() -> None:
    reference = stories_reference(6, 16)
    found = likelihood_of(word_model(), reference, draws=8)
    assert found["kl_at_most"] > 0 and found["draws"] == 8 and found["tokens"] == 96
    assert found["bits_per_byte"] == pytest.approx(found["nats_per_token"] / math.log(2) / found["bytes_per_token"])
    law = stories_law()
    assert found["entropy_of_the_data"] == pytest.approx(law.block_entropy(16) / 16)


def test_samples_of_another_vocabulary_are_refused(assessor: Assessor) -> None:
    with pytest.raises(UserError, match="`corpus`"):
        assessor.assess(sample_set(np.full((3, 20), 10_000)), PROTOCOLS["ours-1"])


def test_lines_of_different_models_are_refused() -> None:
    lines = [{"ids": [1, 2], "model": name} for name in ("a@1", "b@2")]
    with pytest.raises(UserError, match="several models"):
        SampleSet.from_lines(lines, None)
    with pytest.raises(UserError, match="different lengths"):
        SampleSet.from_lines([{"ids": [1]}, {"ids": [1, 2]}], None)
