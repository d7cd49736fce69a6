"""Facts from mention to mention: which mentions count, and three readers whose order is known."""

from __future__ import annotations

import re

import numpy as np
import torch

from convergeflow.data.stories import stories_law
from convergeflow.studies.reproduce import facts
from convergeflow.studies.reproduce.registry import experiment_by_name
from convergeflow.studies.reproduce.result import ExperimentResult
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel

STORY = (
    "Mia was a kind girl. She had a red kite. One day, the red kite was gone. Mia was sad. "
    "Soon she saw the red kite under the tree. Now she was happy."
)


def encoded(*stories: str) -> torch.Tensor:
    vocabulary = stories_law().word_id
    rows = [[vocabulary[word] for word in re.findall(r"[a-z]+|[.,]|<end>", story.lower())] for story in stories]
    return torch.tensor([row[: min(map(len, rows))] for row in rows])


def test_a_fact_counts_where_one_story_mentions_it_twice() -> None:
    tokens = encoded(STORY)
    words = [stories_law().vocabulary[token] for token in tokens[0].tolist()]
    found = {kind: [words[p] for p in positions] for _, positions, kind in facts.repeated(tokens)}
    assert found == {"name": ["mia"] * 2, "colour": ["red"] * 3, "thing": ["kite"] * 3}
    # The end of a story is the end of its facts.
    parted = encoded("She had a red kite. <end> Then the wind took her red kite away.")
    assert facts.repeated(parted) == []


def test_readers_agree_without_noise_and_pooling_reads_more_in_it() -> None:
    law = stories_law()
    tokens = torch.from_numpy(law.sample(np.random.default_rng(0), 48, 64)).long()
    torch.manual_seed(0)
    model = ConvergeFlowModel(ConvergeFlowConfig.of_size("small", vocabulary=len(law.vocabulary), length=64))
    unigram = torch.full((len(law.vocabulary),), 1 / len(law.vocabulary)).numpy()
    clean = facts._read(model, tokens, unigram, -4.0)
    assert clean["alone"] == clean["pooled"] == clean["model"] == 1.0
    noisy = facts._read(model, tokens, unigram, facts.MIDDLE)
    assert noisy["alone"] + 0.1 < noisy["pooled"] < 1.0
    # A fresh network has a head of zeros: it reads by the kernel alone, as a position by itself does.
    assert abs(noisy["model"] - noisy["alone"]) < 0.02


def test_the_claims_compare_the_readers() -> None:
    def judged(model: float) -> dict[str, str]:
        values = {"alone": 0.4, "alone_se": 0.01, "pooled": 0.8, "pooled_se": 0.01, "model": model, "model_se": 0.01}
        result = ExperimentResult("facts", "embedded", [{"gamma": facts.MIDDLE, "values": {**values, "facts": 100}}])
        return {name: str(judgement.verdict) for name, judgement in experiment_by_name("facts").judge(result).items()}

    assert judged(0.79) == {"beats-alone": "reproduced", "pools": "reproduced"}
    assert judged(0.6) == {"beats-alone": "reproduced", "pools": "not reproduced"}
    assert judged(0.3) == {"beats-alone": "not reproduced", "pools": "not reproduced"}
