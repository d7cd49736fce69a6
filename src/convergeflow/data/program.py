"""Programs that write words and remember facts: the language they are written in, and their compilation to tables.

A counter is a position of the program with the set of facts that are fixed there. Which facts are fixed, the
probabilities of a choice and the successors depend on the counter alone; see `automaton.py` for what the tables are
good for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

END_TOKEN = "<end>"
"""Closes a story."""
FULL_STOP = "."
"""Closes a sentence."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


# --- the language in which a program is written ---


@dataclass(frozen=True)
class Fact:
    """Something that is drawn once in a story, at its first mention, and holds until the story ends."""

    name: str
    words: tuple[str, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.words) == len(self.probabilities) == len(set(self.words)), self.name
        assert abs(sum(self.probabilities) - 1) < 1e-12 and min(self.probabilities) > 0, self.name


@dataclass(frozen=True, eq=False)
class Say:
    """One fixed word."""

    word: str


@dataclass(frozen=True, eq=False)
class Mention:
    """The word of a fact: drawn here if the story has not mentioned it yet, forced otherwise."""

    fact: str


@dataclass(frozen=True, eq=False)
class Article:
    """`the` before a fact that the story has mentioned already, `a` before a new one."""

    fact: str
    new: str = "a"
    known: str = "the"


@dataclass(frozen=True, eq=False)
class Line:
    """Pieces one after another."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, eq=False)
class Choice:
    """One of several pieces, with probabilities that sum to one. An alternative may be empty (`Line(())`)."""

    alternatives: tuple[tuple[float, Piece], ...]


Piece = Say | Mention | Article | Line | Choice


def line(template: str, slots: Mapping[str, Piece]) -> Line:
    """The pieces of a line of words; `{name}` stands for the piece of that name."""
    return Line(tuple(slots[word[1:-1]] if word.startswith("{") else Say(word) for word in template.split()))


def lines(weighted: Mapping[str, float], slots: Mapping[str, Piece]) -> Piece:
    """One of several lines. Common beginnings are written once, so that alternatives differ in their first word."""
    if len(weighted) == 1:
        return line(next(iter(weighted)), slots)
    branches: dict[str, dict[str, float]] = {}
    for template, weight in weighted.items():
        first, _, following = template.partition(" ")
        branches.setdefault(first, {})[following] = weight
    total = sum(weighted.values())
    alternatives: list[tuple[float, Piece]] = []
    for first, following_weights in branches.items():
        share = sum(following_weights.values()) / total
        alternatives.append((share, Line((line(first, slots), lines(following_weights, slots)))))
    return Choice(tuple(alternatives))


def one_of(**words: float) -> Choice:
    """One word, with the given probabilities."""
    return Choice(tuple((probability, Say(word)) for word, probability in words.items()))


# --- compilation ---


@dataclass(frozen=True)
class _Option:
    probability: float
    emission: Say | Mention | Article
    target: int
    closes: bool = False  # the end token: the story is over and all facts are forgotten


_Counter = tuple[int, frozenset[str]]
"""A position of the program and the facts that are fixed there."""


class _Arc(NamedTuple):
    """A word that can come at a counter; `known` says that the word must be the value of a fact that is fixed."""

    counter: int
    word: int
    probability: float
    target: int
    fact: int = -1
    value: int = -1
    known: bool = False


class _Branch(NamedTuple):
    """One outcome of a draw at a counter: a word, or the word of a fixed fact."""

    counter: int
    probability: float
    word: int
    fact: int
    option: int


class _Counters:
    """Counters in the order in which they are reached: all that the clean law reaches from the first start, then what
    only a jump to one of the other starts can reach."""

    def __init__(self, start: int, starts: Sequence[_Counter]) -> None:
        self.starts = list(starts)
        self.queue: list[_Counter] = []
        self.index: dict[_Counter, int] = {}
        self.num_clean = 0
        self.number((start, frozenset()))

    def number(self, counter: _Counter) -> int:
        """The number of a counter, a new one if it was not reached before."""
        if counter not in self.index:
            self.index[counter] = len(self.queue)
            self.queue.append(counter)
        return self.index[counter]

    def __iter__(self) -> Iterator[tuple[int, int, frozenset[str]]]:
        """Every counter once, with those that are numbered meanwhile."""
        done = 0
        for start in self.starts:
            self.number(start)
            while done < len(self.queue):
                yield done, *self.queue[done]
                done += 1
            self.num_clean = self.num_clean or done


@dataclass
class _Positions:
    """The program as a graph of positions, before the facts that are fixed there are known."""

    options: list[tuple[_Option, ...]] = field(default_factory=list)
    _built: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, options: tuple[_Option, ...]) -> int:
        self.options.append(options)
        return len(self.options) - 1

    def entry(self, piece: Piece, following: int) -> int:
        """The position at which `piece` starts when `following` comes after it."""
        key = (id(piece), following)
        if key not in self._built:
            self._built[key] = self._build(piece, following)
        return self._built[key]

    def _build(self, piece: Piece, following: int) -> int:
        if isinstance(piece, Line):
            for part in reversed(piece.pieces):
                following = self.entry(part, following)
            return following
        if isinstance(piece, Choice):
            total = sum(probability for probability, _ in piece.alternatives)
            assert abs(total - 1) < 1e-9, f"the probabilities of a choice sum to {total}"
            merged = [
                replace(option, probability=probability * option.probability)
                for probability, alternative in piece.alternatives
                for option in self.options[self.entry(alternative, following)]
            ]
            return self.add(tuple(merged))
        return self.add((_Option(1.0, piece, following),))


@dataclass(frozen=True, eq=False)
class Tables:
    """A compiled program. C counters, V words, F facts, B branches."""

    facts: tuple[Fact, ...]
    vocabulary: list[str]
    """The end token first."""
    word_id: dict[str, int]
    full_stop: int
    """The word that closes a sentence."""
    starts: Ints
    """The counters at which a sentence can start; the first is the start of a story, counter 0."""
    num_clean_counters: int
    """How many counters the clean law reaches; the others only a jump."""
    position: Ints
    """The position of each counter in the program, [C]."""
    remembers: NDArray[np.bool_]
    """[C, F]: whether a fact is fixed at a counter, so that its value belongs to the state there."""
    arc_probability: Floats
    """[C, V], as the following: the probability of a word at a counter."""
    arc_target: Ints
    """The next counter; -1 where the word cannot come."""
    arc_fact: Ints
    arc_value: Ints
    """The fact that the word tells and its value; -1 where it tells none."""
    arc_checks: NDArray[np.bool_]
    """Whether the fact is fixed already, and the word must agree with it."""
    choice_entropy: Floats
    """Nats of the draw at a counter, [C]."""
    _options: list[tuple[_Option, ...]]
    _fact_words: Ints
    """[F, values]: the words of each fact."""
    _branch_counter: Ints
    """[B], as the following: one entry for each outcome of each draw, in the order of the counters."""
    _branch_probability: Floats
    _branch_word: Ints
    """-1 where the word is the value of a fixed fact."""
    _branch_fact: Ints
    _branch_option: Ints
    _branch_target: Ints
    """The next counter."""
    _branch_edges: Floats
    """One ascending array for all counters: counter number + cumulated probability inside the counter."""
    _branch_last: Ints
    """The last branch of each counter, [C]."""


class Compiler:
    """A program over a list of facts on its way to tables."""

    def __init__(self, program: Piece, facts: Sequence[Fact]) -> None:
        self.facts = tuple(facts)
        self.fact_index = {fact.name: index for index, fact in enumerate(self.facts)}
        graph = _Positions()
        # The closing position is made first; its target, the story start, is known only when all is built.
        self.start = graph.entry(program, graph.add((_Option(1.0, Say(END_TOKEN), -1, closes=True),)))
        self.options = [
            tuple(replace(option, target=self.start) if option.closes else option for option in options)
            for options in graph.options
        ]
        self.reachable = self._reachable_positions()
        words = {
            word
            for position in self.reachable
            for option in self.options[position]
            for word in self._possible_words(option.emission)
        }
        self.vocabulary = [END_TOKEN, *sorted(words - {END_TOKEN})]
        self.word_id = {word: index for index, word in enumerate(self.vocabulary)}
        self.live = self._liveness()

    def _reachable_positions(self) -> list[int]:
        seen, queue = {self.start}, [self.start]
        for position in queue:
            for option in self.options[position]:
                if option.target not in seen:
                    seen.add(option.target)
                    queue.append(option.target)
        return queue

    def _possible_words(self, emission: Say | Mention | Article) -> tuple[str, ...]:
        if isinstance(emission, Say):
            return (emission.word,)
        if isinstance(emission, Article):
            return (emission.new, emission.known)
        return self.facts[self.fact_index[emission.fact]].words

    def _liveness(self) -> list[frozenset[str]]:
        """Facts that may still be mentioned in this story; the others need not be remembered."""
        live: list[frozenset[str]] = [frozenset() for _ in self.options]
        changed = True
        while changed:
            changed = False
            for position in reversed(self.reachable):
                used: set[str] = set()
                for option in self.options[position]:
                    used |= frozenset() if option.closes else live[option.target]
                    if not isinstance(option.emission, Say):
                        used.add(option.emission.fact)
                if used != live[position]:
                    live[position], changed = frozenset(used), True
        return live

    def tables(self) -> dict[str, Any]:
        """The fields of `Tables`."""
        counters = _Counters(self.start, self._sentence_starts())
        arcs: list[_Arc] = []
        branches: list[_Branch] = []
        for number, position, fixed in counters:
            for option_number, option in enumerate(self.options[position]):
                after = fixed | {option.emission.fact} if isinstance(option.emission, Mention) else fixed
                kept = frozenset[str]() if option.closes else after & self.live[option.target]
                target = counters.number((option.target, kept))
                for arc in self._arcs(number, option, fixed, target):
                    arcs.append(arc)
                    if not arc.known:
                        branches.append(_Branch(number, arc.probability, arc.word, -1, option_number))
                if arcs[-1].known:
                    branches.append(_Branch(number, option.probability, -1, arcs[-1].fact, option_number))
        widest = max((len(fact.words) for fact in self.facts), default=1)
        fact_words = np.full((max(len(self.facts), 1), widest), -1, dtype=np.int64)
        for fact_index, fact in enumerate(self.facts):
            fact_words[fact_index, : len(fact.words)] = [self.word_id[word] for word in fact.words]
        tabulated = self._arc_tables(arcs, len(counters.queue))
        return {
            "facts": self.facts,
            "vocabulary": self.vocabulary,
            "word_id": self.word_id,
            "full_stop": self.word_id[FULL_STOP],
            "starts": np.array([counters.index[counter] for counter in counters.starts], dtype=np.int64),
            "num_clean_counters": counters.num_clean,
            "position": np.array([position for position, _ in counters.queue], dtype=np.int64),
            "remembers": np.array(
                [[fact.name in fixed for fact in self.facts] for _, fixed in counters.queue], dtype=bool
            ).reshape(len(counters.queue), len(self.facts)),
            "_options": self.options,
            "_fact_words": fact_words,
            **tabulated,
            **_branch_tables(branches, tabulated["arc_target"], fact_words),
        }

    def _sentence_starts(self) -> list[_Counter]:
        """The story start and every place behind a full stop where a story can go on, with no facts fixed."""
        starts: list[_Counter] = [(self.start, frozenset())]
        for position in self.reachable:
            for option in self.options[position]:
                ends_sentence = FULL_STOP in self._possible_words(option.emission)
                goes_on = not all(after.closes for after in self.options[option.target])
                if ends_sentence and goes_on and (option.target, frozenset()) not in starts:
                    starts.append((option.target, frozenset()))
        return starts

    def _arcs(self, counter: int, option: _Option, fixed: frozenset[str], target: int) -> Iterator[_Arc]:
        """The words with which an option can go on from a counter."""
        emission, probability = option.emission, option.probability
        if isinstance(emission, Mention):
            fact_index, known = self.fact_index[emission.fact], emission.fact in fixed
            fact = self.facts[fact_index]
            for value, word in enumerate(fact.words):
                share = 1.0 if known else fact.probabilities[value]
                yield _Arc(counter, self.word_id[word], probability * share, target, fact_index, value, known)
            return
        if isinstance(emission, Article):
            word = emission.known if emission.fact in fixed else emission.new
        else:
            word = emission.word
        yield _Arc(counter, self.word_id[word], probability, target)

    def _arc_tables(self, arcs: Sequence[_Arc], num_counters: int) -> dict[str, Any]:
        shape = (num_counters, len(self.vocabulary))
        probability, checks = np.zeros(shape), np.zeros(shape, dtype=bool)
        target, about, value = (np.full(shape, -1, dtype=np.int64) for _ in range(3))
        for arc in arcs:
            at = arc.counter, arc.word
            if target[at] >= 0:
                raise ValueError(
                    f"two alternatives start with {self.vocabulary[arc.word]!r}; they must differ in their first word"
                )
            probability[at], target[at], about[at], value[at], checks[at] = arc[2:]
        return {
            "arc_probability": probability,
            "arc_target": target,
            "arc_fact": about,
            "arc_value": value,
            "arc_checks": checks,
        }


def _branch_tables(branches: Sequence[_Branch], arc_target: Ints, fact_words: Ints) -> dict[str, Any]:
    num_counters = len(arc_target)
    counter, word, fact, option = (
        np.array([getattr(branch, name) for branch in branches], dtype=np.int64)
        for name in ("counter", "word", "fact", "option")
    )
    probability = np.array([branch.probability for branch in branches])
    first = np.searchsorted(counter, np.arange(num_counters))
    last = np.searchsorted(counter, np.arange(num_counters), side="right") - 1
    cumulated = np.cumsum(probability)
    before = np.where(first > 0, cumulated[first - 1], 0.0)
    inside = cumulated - before[counter]
    inside[last] = 1.0
    entropy = np.zeros(num_counters)
    np.add.at(entropy, counter, -probability * np.log(probability))
    leads_to = [
        arc_target[c, w] if w >= 0 else arc_target[c, fact_words[f, 0]]
        for c, w, f in zip(counter, word, fact, strict=True)
    ]
    return {
        "choice_entropy": entropy,
        "_branch_counter": counter,
        "_branch_probability": probability,
        "_branch_word": word,
        "_branch_fact": fact,
        "_branch_option": option,
        "_branch_edges": counter + inside,
        "_branch_last": last,
        "_branch_target": np.array(leads_to, dtype=np.int64),
    }
