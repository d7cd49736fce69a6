"""The exact laws against brute force over every text of a tiny grammar, written out by hand a second time."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest

from convergeflow.data.automaton import Grammar
from convergeflow.data.program import Article, Choice, Fact, Line, Mention, Say, line, lines
from convergeflow.evaluation.exact import divergence

EPS = 1e-3


def tiny_grammar() -> Grammar:
    """`x . [x .]` with the fact x in {a, b}; the second sentence comes with probability 0.4. V = 4."""
    fact = Fact("x", ("a", "b"), (0.7, 0.3))
    sentence = Line((Mention("x"), Say(".")))
    again = Line((Mention("x"), Say(".")))
    return Grammar(Line((sentence, Choice(((0.4, again), (0.6, Line(())))))), [fact])


# The same law by hand. A state is (place, value of x or None); places: 0 first x, 1 first full stop, 2
# after the first sentence, 3 second full stop, 4 the end token is due.
def hand_step(state: tuple[int, str | None]) -> list[tuple[str, float, tuple[int, str | None]]]:
    place, x = state
    draws = [("a", 0.7), ("b", 0.3)]
    if place == 0:
        return [(word, share, (1, word)) for word, share in draws]
    if place == 1:
        return [(".", 1.0, (2, x))]
    if place == 2:
        mention = draws if x is None else [(x, 1.0)]
        # After the second mention x is not needed any more, so it is forgotten.
        return [(word, 0.4 * share, (3, None)) for word, share in mention] + [("<end>", 0.6, (0, None))]
    if place == 3:
        return [(".", 1.0, (4, None))]
    return [("<end>", 1.0, (0, None))]


SENTENCE_STARTS: list[tuple[int, str | None]] = [(0, None), (2, None)]


def hand_probability(text: tuple[str, ...], eps: float) -> float:
    mass: dict[tuple[int, str | None], float] = {(0, None): 1.0}
    for word in text:
        after: dict[tuple[int, str | None], float] = defaultdict(float)
        for state, weight in mass.items():
            for emitted, share, target in hand_step(state):
                if emitted == word:
                    after[target] += weight * (1 - eps) * share
            after[state] += weight * eps / 4 / 2
            for start in SENTENCE_STARTS:
                after[start] += weight * eps / 4 / 2 / len(SENTENCE_STARTS)
        mass = after
    return sum(mass.values())


def all_texts(grammar: Grammar, length: int) -> np.ndarray:
    return np.array(list(itertools.product(range(len(grammar.vocabulary)), repeat=length)))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_both_laws_sum_to_one_and_match_the_law_by_hand(length: int) -> None:
    grammar = tiny_grammar()
    assert grammar.vocabulary == ["<end>", ".", "a", "b"]
    texts = all_texts(grammar, length)
    clean = np.exp(-grammar.clean_nll(texts))
    smoothed = np.exp(-grammar.smoothed_nll(texts, EPS))
    assert clean.sum() == pytest.approx(1, abs=1e-12)
    assert smoothed.sum() == pytest.approx(1, abs=1e-12)
    words = [tuple(grammar.vocabulary[i] for i in text) for text in texts]
    np.testing.assert_allclose(clean, [hand_probability(text, 0.0) for text in words], atol=1e-14)
    np.testing.assert_allclose(smoothed, [hand_probability(text, EPS) for text in words], rtol=1e-10)


@pytest.mark.parametrize("eps", [1e-3, 0.3])
def test_smoothed_law_does_not_depend_on_how_rows_are_grouped(eps: float) -> None:
    grammar = tiny_grammar()
    texts = all_texts(grammar, 4)
    together = grammar.smoothed_nll(texts, eps, rows_at_once=256)
    np.testing.assert_allclose(together, grammar.smoothed_nll(texts, eps, rows_at_once=3), rtol=1e-12)


@pytest.mark.parametrize("length", [1, 3, 5])
def test_block_entropy_is_the_entropy_of_all_blocks(length: int) -> None:
    grammar = tiny_grammar()
    probability = np.exp(-grammar.clean_nll(all_texts(grammar, length)))
    positive = probability[probability > 0]
    assert grammar.block_entropy(length) == pytest.approx(float(-(positive * np.log(positive)).sum()), abs=1e-12)


def test_sampled_frequencies_match_the_law() -> None:
    grammar = tiny_grammar()
    num = 40_000
    ids = grammar.sample(np.random.default_rng(1), num, 5)
    codes = ids @ (4 ** np.arange(4, -1, -1))
    observed = np.bincount(codes, minlength=4**5)
    expected = np.exp(-grammar.clean_nll(all_texts(grammar, 5))) * num
    assert (observed[expected == 0] == 0).all()
    used = expected > 0
    statistic = ((observed[used] - expected[used]) ** 2 / expected[used]).sum()
    assert statistic < used.sum() + 4 * math.sqrt(2 * used.sum())


def test_a_row_is_the_same_however_many_are_drawn() -> None:
    grammar = tiny_grammar()
    few = grammar.sample(np.random.default_rng(3), 4, 12)
    many = grammar.sample(np.random.default_rng(3), 9, 12)
    np.testing.assert_array_equal(few, many[:4])


def test_sentences_and_stories_are_judged_apart() -> None:
    grammar = tiny_grammar()
    ids = {word: index for index, word in enumerate(grammar.vocabulary)}

    def judge(words: str) -> tuple[int, int, int, int]:
        block = [[ids[word] for word in words.split()]]
        valid, total = grammar.valid_sentences(block)
        good, stories = grammar.valid_stories(block)
        return int(valid[0]), int(total[0]), int(good[0]), int(stories[0])

    assert judge("a . a . <end> b") == (3, 3, 2, 2)
    assert judge("a . b . <end> b") == (3, 3, 1, 2)  # each sentence stands, the fact is broken
    assert judge("a a . <end> b .") == (1, 2, 1, 2)
    assert judge("a <end> b . <end>") == (1, 2, 1, 2)  # an end token inside a sentence breaks it off
    assert judge("a . a . a .") == (3, 3, 0, 1)


def test_slots_are_counted_and_compared() -> None:
    grammar = tiny_grammar()
    a, b, stop, end = (grammar.word_id[word] for word in ("a", "b", ".", "<end>"))
    counts = grammar.slot_counts([[a, stop, a, stop, end, b, stop, end]])
    assert counts["x"].tolist() == [1, 1]
    assert counts["[x]|<end>"].tolist() == [1, 1]
    kl = divergence(counts["x"], grammar.slot_marginals()["x"])
    assert kl == pytest.approx(0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3))


def test_article_tells_new_from_known() -> None:
    fact = Fact("animal", ("cat", "dog"), (0.5, 0.5))
    slots = {"an": Article("animal"), "animal": Mention("animal")}
    grammar = Grammar(line("{an} {animal} . {an} {animal} .", slots), [fact])

    def valid(words: str) -> bool:
        return bool(np.isfinite(grammar.clean_nll([[grammar.word_id[word] for word in words.split()]]))[0])

    assert valid("a cat . the cat . <end> a dog")
    assert not valid("a cat . a cat .")
    assert not valid("a cat . the dog .")
    assert not valid("the cat .")
    sentences = grammar.valid_sentences([[grammar.word_id[word] for word in ["a", "cat", ".", "the", "dog", "."]]])
    assert (int(sentences[0][0]), int(sentences[1][0])) == (2, 2)


def test_common_beginnings_are_factored_and_real_clashes_refused() -> None:
    program = lines({"a b .": 0.2, "a c .": 0.3, "d .": 0.5}, {})
    grammar = Grammar(program, [])
    text = [[grammar.word_id[word] for word in ["a", "c", "."]]]
    assert grammar.clean_nll(text)[0] == pytest.approx(-math.log(0.3))
    clash = Choice(((0.5, line("a b .", {})), (0.5, line("a c .", {}))))
    with pytest.raises(ValueError, match="'a'"):
        Grammar(clash, [])
