"""Scorers against hand-computed numbers, transformers' own loss, and each other."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import scorer_stand_ins as stand_ins
import torch

from convergeflow.data.fetch import is_fetched
from convergeflow.data.stories import stories_law
from convergeflow.data.tokenizer import byte_tokenizer, stories_tokenizer
from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.evaluation.generative import Scored, mean_nll, perplexity
from convergeflow.evaluation.protocol import PROTOCOLS, protocols_named
from convergeflow.evaluation.scorers import CausalScorer, ExactScorer, Scorer, Texts, scorer_named, split_documents

# p(next | last) over the words "|" (end of text), "a", "b"
TABLE = np.array([[0.2, 0.5, 0.3], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])


@pytest.fixture
def toy() -> CausalScorer:
    return CausalScorer(
        "toy",
        stand_ins.TableModel(TABLE),
        stand_ins.WordTokenizer(["|", "a", "b"]),
        start_id=0,
        end_id=0,
        weights="table",
    )


def nats(*probabilities: float) -> float:
    return -sum(math.log(p) for p in probabilities)


def test_each_protocol_counts_the_tokens_it_says_it_counts(toy: CausalScorer) -> None:
    # "a b | a | b": two ends of text, three documents
    texts = Texts(None, [["a b", "a", "b"]])
    a_b, b_end, end_a, a_end, end_b = 0.3, 0.25, 0.5, 0.1, 0.3
    expected = {
        "ours-1": (nats(0.5, a_b, b_end, end_a, a_end, end_b), 6),
        "convergeflow-2026": (nats(a_b, b_end, end_a, a_end, end_b), 5),
        "langflow-2026": (nats(a_b, b_end, end_a, a_end, end_b), 5),
        "duo-2026": (nats(a_b, b_end, end_a, end_b), 4),
        "elf-2026": (nats(a_b, b_end), 2),
    }
    assert set(expected) == set(PROTOCOLS)
    for name, (nll, tokens) in expected.items():
        # the table model ignores number formats except by the rounding of its entries
        tolerance = {"float32": 1e-6, "float16": 1e-2, "bfloat16": 3e-2}[PROTOCOLS[name].dtype]
        scored = toy.score(texts, PROTOCOLS[name])
        assert scored.tokens.tolist() == [tokens], name
        assert scored.nll[0] == pytest.approx(nll, rel=tolerance), name
        assert perplexity(scored).value == pytest.approx(math.exp(nll / tokens), rel=tolerance)


def test_a_leading_end_uses_up_the_first_end_of_duo(toy: CausalScorer) -> None:
    # blocks of that project begin with an end of text: the later one is the second
    scored = toy.score(Texts(None, [["", "a", "b"]]), PROTOCOLS["duo-2026"])
    assert scored.tokens.tolist() == [2] and scored.nll[0] == pytest.approx(nats(0.5, 0.3), rel=1e-6)


def test_empty_samples(toy: CausalScorer) -> None:
    texts = Texts(None, [["a b"], [""], ["", "b"]])
    elf = toy.score(texts, PROTOCOLS["elf-2026"])
    assert elf.tokens.tolist() == [1, 0, 0] and elf.empty == 2
    ours = toy.score(texts, PROTOCOLS["ours-1"])
    assert ours.tokens.tolist() == [2, 0, 2] and ours.empty == 1
    with pytest.raises(ConvergeFlowError, match="no token was scored"):
        perplexity(toy.score(Texts(None, [["a"]]), PROTOCOLS["convergeflow-2026"]))


def test_aggregation_by_hand() -> None:
    scored = Scored(np.array([2.0, 9.0]), np.array([2, 6]))
    assert mean_nll(scored).value == pytest.approx(11 / 8)
    # residuals 2 - 22/8 = -3/4 and 9 - 66/8 = 3/4; sqrt(2 (9/16)/2)/4 = 3/16
    assert mean_nll(scored).se == pytest.approx(3 / 16)
    assert perplexity(scored).se == pytest.approx(math.exp(11 / 8) * 3 / 16)
    assert perplexity(scored, "sample").value == pytest.approx((math.exp(1.0) + math.exp(1.5)) / 2)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_ins.random_gpt2(tmp_path_factory.mktemp("scorer") / "gpt2")


def test_scores_are_transformers_own_loss(gpt2: Path) -> None:
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(gpt2).eval()
    scorer = scorer_named(str(gpt2), device="cpu")
    texts = ["Who has lost a hat?", "A.", "The fox found it under the tree, near the mill.", "Ja, és!"]
    scored = scorer.score(Texts(None, [[text] for text in texts]), PROTOCOLS["convergeflow-2026"])
    started = scorer.score(Texts(None, [[text] for text in texts]), PROTOCOLS["ours-1"])
    for i, text in enumerate(texts):
        ids = list(text.encode())[:48]
        with torch.no_grad():
            alone = model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss
            whole = [256, *ids][:48]
            with_start = model(input_ids=torch.tensor([whole]), labels=torch.tensor([whole])).loss
        assert scored.tokens[i] == len(ids) - 1 and started.tokens[i] == len(whole) - 1
        assert scored.nll[i] / scored.tokens[i] == pytest.approx(float(alone), rel=1e-5)
        assert started.nll[i] / started.tokens[i] == pytest.approx(float(with_start), rel=1e-5)
    assert started.truncated == 0 and scorer.describe()["start_id"] == 256


def test_batch_size_does_not_change_a_score(gpt2: Path) -> None:
    texts = Texts(None, [["x" * n, "y"] for n in (1, 30, 5, 17)])
    alone = scorer_named(str(gpt2), device="cpu", batch=1).score(texts, PROTOCOLS["ours-1"])
    together = scorer_named(str(gpt2), device="cpu", batch=4).score(texts, PROTOCOLS["ours-1"])
    assert alone.nll == pytest.approx(together.nll, rel=1e-5) and (alone.tokens == together.tokens).all()


def test_long_samples_are_cut_and_counted(gpt2: Path) -> None:
    scorer = scorer_named(str(gpt2), device="cpu")
    scored = scorer.score(Texts(None, [["x" * 100], ["x" * 10]]), PROTOCOLS["ours-1"])
    assert scored.truncated == 1 and scored.tokens.tolist() == [47, 10]


def test_half_precision_protocols_round_the_weights_only_for_themselves(gpt2: Path) -> None:
    scorer = scorer_named(str(gpt2), device="cpu")
    assert isinstance(scorer, CausalScorer)
    texts = Texts(None, [["The fox found it."]])
    before = scorer.score(texts, PROTOCOLS["convergeflow-2026"]).nll[0]
    half = scorer.score(texts, PROTOCOLS["langflow-2026"]).nll[0]
    assert half != before and half == pytest.approx(before, rel=5e-3)
    assert scorer.score(texts, PROTOCOLS["convergeflow-2026"]).nll[0] == before
    assert "float16" in scorer.arithmetic(PROTOCOLS["langflow-2026"])


def test_documents_are_cut_at_the_end_token() -> None:
    tokenizer = byte_tokenizer()
    assert split_documents([*b"ab", 256, *b"c"], tokenizer) == ["ab", "c"]
    assert split_documents([*b"ab", 256], tokenizer) == ["ab", ""]
    assert split_documents([256, 256], tokenizer) == ["", "", ""]


def test_exact_scorer_is_the_smoothed_law_and_data_scores_its_entropy() -> None:
    law = stories_law()
    ids = law.sample(np.random.default_rng(3), 200, 40)
    scored = ExactScorer().score(Texts(ids, []), PROTOCOLS["ours-1"])
    assert scored.nll == pytest.approx(law.smoothed_nll(ids), rel=1e-12)
    found = mean_nll(scored)
    # what eps costs on clean text is at most log(1/(1 - eps)) per token
    assert abs(found.value - law.block_entropy(40) / 40) < 4 * found.se + 0.0011


def orderings(scorer: Scorer, num: int, length: int) -> list[float]:
    law, rng = stories_law(), np.random.default_rng(8)
    real = law.sample(rng, num, length)
    shuffled = rng.permuted(real, axis=1)
    noise = rng.integers(1, len(law.vocabulary), real.shape)
    tokenizer = stories_tokenizer()
    return [
        perplexity(scorer.score(Texts.from_ids(ids, tokenizer), PROTOCOLS["ours-1"])).value
        for ids in (real, shuffled, noise)
    ]


@pytest.mark.parametrize("name", ["exact", "bigram"])
def test_real_text_scores_below_shuffled_below_random(name: str) -> None:
    real, shuffled, noise = orderings(ExactScorer() if name == "exact" else stand_ins.bigram_scorer(), 24, 32)
    assert 1.5 * real < shuffled < noise / 1.2


@pytest.mark.slow
@pytest.mark.skipif(not is_fetched("smollm2"), reason="smollm2 is not on this machine: convergeflow fetch smollm2")
def test_smollm2_puts_real_below_shuffled_below_random() -> None:
    real, shuffled, noise = orderings(scorer_named("smollm2", device="cpu"), 3, 24)
    assert 3 * real < shuffled < noise


def test_mistakes_are_named(gpt2: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'smollm2'"):
        scorer_named("smolm2")
    with pytest.raises(UserError, match="does not hold a causal language model"):
        scorer_named(str(tmp_path))
    with pytest.raises(UserError, match="did you mean 'duo-2026'"):
        protocols_named("duo-2025")
    with pytest.raises(UserError, match="knows ours-1 only"):
        ExactScorer().score(Texts(np.zeros((1, 4), dtype=int), []), PROTOCOLS["duo-2026"])
    with pytest.raises(UserError, match="ids only"):
        scorer_named(str(gpt2), device="cpu").score(Texts(np.zeros((1, 4), dtype=int), []), PROTOCOLS["ours-1"])
    assert [p.id for p in protocols_named("ours-1, elf-2026")] == ["ours-1", "elf-2026"]
    assert len(protocols_named("all")) == 5
