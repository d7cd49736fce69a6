"""Text whose law is known exactly: programs that write words and remember facts, compiled to a unifilar
automaton.

A state is (counter, values of the facts fixed so far), and the emitted word determines the next state. A
fact is drawn at its first mention and forced afterwards; which facts are fixed, the probabilities of a
choice and the successors depend on the counter alone. Hence the likelihood of a text is one walk, the
entropy of a block is a sum over counters, and the smoothed law (every text possible) is a sparse hidden
Markov model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

END = 0
"""The id of the token that closes a story, in every vocabulary of this room."""

# Values of a fact: not fixed; or fixed by a context that is not seen, so that the next mention tells it.
_UNSET, _ANY = -1, -2


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
    """One of several lines. Common beginnings are written once, so that alternatives differ in their first
    word."""
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


class Grammar:
    """A program of stories over a list of facts, compiled to tables.

    `vocabulary[0]` is the end token. `terminators` are the words that close a sentence; a sentence start is a counter
    that follows one (or an end token) and can go on with a word.
    """

    def __init__(
        self,
        program: Piece,
        facts: Sequence[Fact],
        *,
        end: str = "<end>",
        terminators: Sequence[str] = (".",),
        extra_words: Sequence[str] = (),
    ) -> None:
        self.facts = tuple(facts)
        self._fact_index = {fact.name: index for index, fact in enumerate(self.facts)}
        graph = _Positions()
        # The closing position is made first; its target, the story start, is known only when all is built.
        self._start = graph.entry(program, graph.add((_Option(1.0, Say(end), -1, closes=True),)))
        self._options = [
            tuple(replace(option, target=self._start) if option.closes else option for option in options)
            for options in graph.options
        ]
        self.vocabulary = self._collect_words(end, extra_words)
        self.word_id = {word: index for index, word in enumerate(self.vocabulary)}
        self.terminators = frozenset(self.word_id[word] for word in terminators if word in self.word_id)
        self._live = self._liveness()
        self._compile()

    # --- compiling ---

    def _reachable_positions(self) -> list[int]:
        seen, queue = {self._start}, [self._start]
        for position in queue:
            for option in self._options[position]:
                if option.target not in seen:
                    seen.add(option.target)
                    queue.append(option.target)
        return queue

    def _collect_words(self, end: str, extra: Sequence[str]) -> list[str]:
        words: dict[str, None] = {end: None}
        for position in self._reachable_positions():
            for option in self._options[position]:
                words.update(dict.fromkeys(self._possible_words(option.emission)))
        words.update(dict.fromkeys(extra))
        return [end, *sorted(word for word in words if word != end)]

    def _possible_words(self, emission: Say | Mention | Article) -> tuple[str, ...]:
        if isinstance(emission, Say):
            return (emission.word,)
        if isinstance(emission, Article):
            return (emission.new, emission.known)
        return self.facts[self._fact_index[emission.fact]].words

    def _liveness(self) -> list[frozenset[str]]:
        """Facts that may still be mentioned in this story; the others need not be remembered."""
        live: list[frozenset[str]] = [frozenset() for _ in self._options]
        changed = True
        while changed:
            changed = False
            for position in reversed(self._reachable_positions()):
                used: set[str] = set()
                for option in self._options[position]:
                    used |= frozenset() if option.closes else live[option.target]
                    if not isinstance(option.emission, Say):
                        used.add(option.emission.fact)
                if used != live[position]:
                    live[position], changed = frozenset(used), True
        return live

    def _compile(self) -> None:
        counters = _Counters(self._start, self._sentence_starts())
        arcs: list[_Arc] = []
        branches: list[_Branch] = []
        for number, position, fixed in counters:
            for option_number, option in enumerate(self._options[position]):
                after = fixed | {option.emission.fact} if isinstance(option.emission, Mention) else fixed
                kept = frozenset[str]() if option.closes else after & self._live[option.target]
                target = counters.number((option.target, kept))
                for arc in self._arcs(number, option, fixed, target):
                    arcs.append(arc)
                    if not arc.known:
                        branches.append(_Branch(number, arc.probability, arc.word, -1, option_number))
                if arcs[-1].known:
                    branches.append(_Branch(number, option.probability, -1, arcs[-1].fact, option_number))
        self.start = 0
        self.starts = np.array([counters.index[counter] for counter in counters.starts], dtype=np.int64)
        self.num_clean_counters = counters.num_clean
        self.position = np.array([position for position, _ in counters.queue], dtype=np.int64)
        # remembers[c, f]: fact f is fixed at counter c, so its value belongs to the state there.
        self.remembers = np.array(
            [[fact.name in fixed for fact in self.facts] for _, fixed in counters.queue], dtype=bool
        ).reshape(len(counters.queue), len(self.facts))
        self._tabulate_arcs(arcs, len(counters.queue))
        self._tabulate_branches(branches, len(counters.queue))

    def _sentence_starts(self) -> list[_Counter]:
        """The story start and every place behind a terminator where a story can go on, with no facts fixed."""
        starts: list[_Counter] = [(self._start, frozenset())]
        for position in self._reachable_positions():
            for option in self._options[position]:
                words = self._possible_words(option.emission)
                ends_sentence = any(self.word_id[word] in self.terminators for word in words)
                goes_on = not all(after.closes for after in self._options[option.target])
                if ends_sentence and goes_on and (option.target, frozenset()) not in starts:
                    starts.append((option.target, frozenset()))
        return starts

    def _arcs(self, counter: int, option: _Option, fixed: frozenset[str], target: int) -> Iterator[_Arc]:
        """The words with which an option can go on from a counter."""
        emission, probability = option.emission, option.probability
        if isinstance(emission, Mention):
            fact_index, known = self._fact_index[emission.fact], emission.fact in fixed
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

    def _tabulate_arcs(self, arcs: Sequence[_Arc], num_counters: int) -> None:
        shape = (num_counters, len(self.vocabulary))
        self.arc_probability = np.zeros(shape)
        self.arc_target = np.full(shape, -1, dtype=np.int64)
        self.arc_fact = np.full(shape, -1, dtype=np.int64)
        self.arc_value = np.full(shape, -1, dtype=np.int64)
        self.arc_checks = np.zeros(shape, dtype=bool)
        for arc in arcs:
            at = arc.counter, arc.word
            if self.arc_target[at] >= 0:
                raise ValueError(
                    f"two alternatives start with {self.vocabulary[arc.word]!r}; they must differ in their first word"
                )
            self.arc_probability[at] = arc.probability
            self.arc_target[at] = arc.target
            self.arc_fact[at] = arc.fact
            self.arc_value[at] = arc.value
            self.arc_checks[at] = arc.known
        widest = max((len(fact.words) for fact in self.facts), default=1)
        self._fact_words = np.full((max(len(self.facts), 1), widest), -1, dtype=np.int64)
        for fact_index, fact in enumerate(self.facts):
            self._fact_words[fact_index, : len(fact.words)] = [self.word_id[word] for word in fact.words]

    def _tabulate_branches(self, branches: Sequence[_Branch], num_counters: int) -> None:
        self._branch_counter = np.array([branch.counter for branch in branches], dtype=np.int64)
        self._branch_probability = np.array([branch.probability for branch in branches])
        self._branch_word = np.array([branch.word for branch in branches], dtype=np.int64)
        self._branch_fact = np.array([branch.fact for branch in branches], dtype=np.int64)
        self._branch_option = np.array([branch.option for branch in branches], dtype=np.int64)
        # One ascending array for all counters: counter number + cumulated probability inside the counter.
        first = np.searchsorted(self._branch_counter, np.arange(num_counters))
        last = np.searchsorted(self._branch_counter, np.arange(num_counters), side="right") - 1
        cumulated = np.cumsum(self._branch_probability)
        before = np.where(first > 0, cumulated[first - 1], 0.0)
        inside = cumulated - before[self._branch_counter]
        inside[last] = 1.0
        self._branch_edges = self._branch_counter + inside
        self._branch_last = last

        self.choice_entropy = np.zeros(num_counters)
        np.add.at(
            self.choice_entropy, self._branch_counter, -self._branch_probability * np.log(self._branch_probability)
        )
        # step[c, c']: probability of going from counter c to counter c' in the clean law.
        self._edge_from = self._branch_counter
        self._edge_to = np.array(
            [
                self.arc_target[c, w] if w >= 0 else self.arc_target[c, self._fact_words[f, 0]]
                for c, w, f in zip(self._branch_counter, self._branch_word, self._branch_fact, strict=True)
            ],
            dtype=np.int64,
        )

    # --- walking ---

    @property
    def num_counters(self) -> int:
        return int(self.arc_target.shape[0])

    def _follow(self, counters: Ints, values: Ints, words: Ints) -> tuple[Floats, Ints, Ints]:
        """One clean step of many states: probability of the word (0 where impossible), new counters, new
        values."""
        probability = self.arc_probability[counters, words].copy()
        target = self.arc_target[counters, words]
        fact = self.arc_fact[counters, words]
        value = self.arc_value[counters, words]
        rows = np.arange(len(counters))
        if self.facts:
            held = values[rows, np.maximum(fact, 0)]
            probability[self.arc_checks[counters, words] & (held != value) & (held != _ANY)] = 0.0
            values = values.copy()
            named = fact >= 0
            values[rows[named], fact[named]] = value[named]
            values[~self.remembers[target]] = _UNSET
        return probability, target, values

    def _fresh(self, shape: int) -> tuple[Ints, Ints]:
        return np.full(shape, self.start, dtype=np.int64), np.full((shape, len(self.facts)), _UNSET, dtype=np.int64)

    def sample(self, rng: np.random.Generator, num: int, length: int) -> Ints:
        """`num` blocks of `length` words, [num, length]; a row does not depend on how many others are
        drawn."""
        uniforms = rng.random((num, length))
        ids = np.empty((num, length), dtype=np.int64)
        counters, values = self._fresh(num)
        for t in range(length):
            branch = np.searchsorted(self._branch_edges, counters + uniforms[:, t], side="right")
            branch = np.minimum(branch, self._branch_last[counters])
            words = self._branch_word[branch]
            fact = self._branch_fact[branch]
            forced = np.flatnonzero(fact >= 0)
            words[forced] = self._fact_words[fact[forced], values[forced, fact[forced]]]
            _, counters, values = self._follow(counters, values, words)
            ids[:, t] = words
        return ids

    def clean_nll(self, ids: ArrayLike) -> Floats:
        """-log P of each block in nats, [num]; infinite for a text that the program cannot write."""
        ids = self._blocks(ids)
        counters, values = self._fresh(len(ids))
        total = np.zeros(len(ids))
        with np.errstate(divide="ignore"):
            for t in range(ids.shape[1]):
                probability, counters, values = self._follow(counters, values, ids[:, t])
                total -= np.log(probability)
                # A dead walk parks at the start: its total is infinite whatever follows.
                counters = np.where(counters < 0, self.start, counters)
        return total

    def smoothed_nll(self, ids: ArrayLike, eps: float = 1e-3, rows_at_once: int = 8) -> Floats:
        """-log of the smoothed law in nats, [num]; finite for every text.

        Each word is a clean step with probability 1 - eps; with eps it is any word of the vocabulary, after
        which the automaton stays where it is (1/2) or jumps to a sentence start with no facts fixed (1/2,
        uniform over them).
        """
        ids = self._blocks(ids)
        parts = [self._forward(ids[first : first + rows_at_once], eps) for first in range(0, len(ids), rows_at_once)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _forward(self, ids: Ints, eps: float) -> Floats:
        num, length = ids.shape
        bases = np.array([len(fact.words) + 1 for fact in self.facts], dtype=np.int64)
        radix = np.concatenate([[1], np.cumprod(bases)]).astype(np.int64)
        assert float(np.prod(bases.astype(float))) * self.num_counters * num < 2**62, "too many facts for one key"
        size = int(radix[-1])
        noise = eps / len(self.vocabulary)
        jump_rows = np.repeat(np.arange(num), len(self.starts))
        jump_keys = (jump_rows * self.num_counters + np.tile(self.starts, num)) * size

        # A state that has been reached keeps some mass for ever (it can stay), so the sorted list of keys
        # only grows.
        keys = np.arange(num, dtype=np.int64) * self.num_counters * size + self.start * size
        mass = np.ones(num)
        log_likelihood = np.zeros(num)
        for t in range(length):
            outer, packed = np.divmod(keys, size)
            rows, counters = np.divmod(outer, self.num_counters)
            words = ids[rows, t]
            possible = np.flatnonzero(self.arc_target[counters, words] >= 0)
            values = packed[possible, None] // radix[:-1] % bases - 1
            probability, target, moved = self._follow(counters[possible], values, words[possible])
            alive = probability > 0
            possible, target, moved = possible[alive], target[alive], moved[alive]
            step_keys = (rows[possible] * self.num_counters + target) * size + (moved + 1) @ radix[:-1]
            step_mass = mass[possible] * probability[alive] * (1 - eps)
            jump_mass = np.bincount(rows, mass, num) * (noise / 2 / len(self.starts))
            new_keys = np.concatenate([step_keys, jump_keys])
            new_mass = np.concatenate([step_mass, jump_mass[jump_rows]])
            mass = mass * (noise / 2)
            place = np.minimum(np.searchsorted(keys, new_keys), len(keys) - 1)
            present = keys[place] == new_keys
            mass += np.bincount(place[present], new_mass[present], len(keys))
            unseen, where = np.unique(new_keys[~present], return_inverse=True)
            at = np.searchsorted(keys, unseen)
            keys = np.insert(keys, at, unseen)
            mass = np.insert(mass, at, np.bincount(where, new_mass[~present], len(unseen)))
            rows = keys // (self.num_counters * size)
            scale = np.bincount(rows, mass, num)
            log_likelihood += np.log(scale)
            mass /= scale[rows]
        return -log_likelihood

    def _blocks(self, ids: ArrayLike) -> Ints:
        array = np.asarray(ids)
        if array.ndim == 1:
            array = array[None]
        array = array.astype(np.int64)
        if array.size and not 0 <= array.min() <= array.max() < len(self.vocabulary):
            raise ValueError(f"ids must lie in 0..{len(self.vocabulary) - 1}")
        return array

    # --- entropy ---

    def entropy_by_position(self, length: int) -> Floats:
        """H(X_t | X_1..X_{t-1}) for t = 1..length in nats, exact, [length]."""
        occupied = np.zeros(self.num_counters)
        occupied[self.start] = 1.0
        entropies = np.empty(length)
        for t in range(length):
            entropies[t] = occupied @ self.choice_entropy
            flow = occupied[self._edge_from] * self._branch_probability
            occupied = np.zeros(self.num_counters)
            np.add.at(occupied, self._edge_to, flow)
        return entropies

    def block_entropy(self, length: int) -> float:
        """H(X_1..X_length) in nats, exact."""
        return float(self.entropy_by_position(length).sum())

    @cached_property
    def _story_visits(self) -> Floats:
        """Expected visits of each counter in one story."""
        num = self.num_clean_counters
        step = np.zeros((num, num))
        inside = (self._edge_from < num) & (self._branch_word != END)
        np.add.at(step, (self._edge_from[inside], self._edge_to[inside]), self._branch_probability[inside])
        begin = np.zeros(num)
        begin[self.start] = 1.0
        visits = np.zeros(self.num_counters)
        visits[:num] = np.linalg.solve(np.eye(num) - step.T, begin)
        return visits

    def story_entropy(self) -> float:
        """Entropy of one story in nats."""
        return float(self._story_visits @ self.choice_entropy)

    def story_length(self) -> float:
        """Expected words of one story, the end token included."""
        return float(self._story_visits.sum())

    def rate(self) -> float:
        """Nats per token of an endless text."""
        return self.story_entropy() / self.story_length()

    @cached_property
    def unigram(self) -> Floats:
        """How often each word occurs in an endless text, [V]; sums to one."""
        # A forced mention repeats the value of the first one, and that was drawn with the fact's own
        # probabilities.
        counts: Floats = np.zeros(len(self.vocabulary))
        weight = self._story_visits[self._branch_counter] * self._branch_probability
        plain = self._branch_word >= 0
        np.add.at(counts, self._branch_word[plain], weight[plain])
        for fact_index, fact in enumerate(self.facts):
            share = weight[self._branch_fact == fact_index].sum()
            ids = self._fact_words[fact_index, : len(fact.words)]
            counts[ids] += share * np.array(fact.probabilities)
        counts /= counts.sum()
        return counts

    # --- validity ---

    @cached_property
    def _contexts(self) -> tuple[Ints, Ints]:
        """Every sentence start of the clean law with its facts fixed to anything: counters and values."""
        clean = np.arange(self.num_clean_counters)
        counters = clean[np.isin(self.position[clean], self.position[self.starts])]
        return counters, np.where(self.remembers[counters], _ANY, _UNSET)

    def valid_sentences(self, ids: ArrayLike, rows_at_once: int = 256) -> tuple[Ints, Ints]:
        """Sentences that occur in some story, taken one by one, and all sentences: [num] each.

        Facts must agree inside the sentence, not with the rest of the text (see `valid_stories`). The cut
        last sentence of a block counts as valid if it can be continued.
        """
        ids = self._blocks(ids)
        parts = [self._valid_sentences(ids[first : first + rows_at_once]) for first in range(0, len(ids), rows_at_once)]
        if not parts:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def _valid_sentences(self, ids: Ints) -> tuple[Ints, Ints]:
        first_counters, first_values = self._contexts
        num, num_contexts = len(ids), len(first_counters)
        valid, total = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.int64)
        counters = np.tile(first_counters, (num, 1))
        values = np.tile(first_values, (num, 1, 1))
        alive = np.ones((num, num_contexts), dtype=bool)
        begun = np.zeros(num, dtype=bool)
        for t in range(ids.shape[1]):
            words = ids[:, t]
            row, context = np.nonzero(alive)
            probability, target, moved = self._follow(counters[alive], values[alive], words[row])
            goes = probability > 0
            alive[row[~goes], context[~goes]] = False
            counters[row[goes], context[goes]] = target[goes]
            values[row[goes], context[goes]] = moved[goes]
            # An end token between two sentences belongs to none; inside a sentence it breaks it off.
            ends = words == END
            boundary = ends & ~begun
            closes = np.isin(words, list(self.terminators)) | (ends & begun)
            begun |= ~boundary
            total += closes
            valid += closes & ~ends & alive.any(1)
            reset = closes | boundary
            counters[reset], alive[reset], begun[reset] = first_counters, True, False
            values[reset] = first_values
        total += begun
        valid += begun & alive.any(1)
        return valid, total

    def valid_stories(self, ids: ArrayLike, *, complete: bool = False) -> tuple[Ints, Ints]:
        """Stories with positive probability and all stories of each block, [num] each.

        The cut last story counts too (valid if it can be continued), unless `complete` asks for whole ones
        only.
        """
        ids = self._blocks(ids)
        num = len(ids)
        valid, total = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.int64)
        counters, values = self._fresh(num)
        alive, begun = np.ones(num, dtype=bool), np.zeros(num, dtype=bool)
        for t in range(ids.shape[1]):
            words = ids[:, t]
            probability, counters, values = self._follow(counters, values, words)
            alive &= probability > 0
            begun[:] = True
            ends = words == END
            total += ends
            valid += ends & alive
            counters = np.where(alive & ~ends, counters, self.start)
            values[ends] = -1
            alive[ends], begun[ends] = True, False
        if not complete:
            total += begun
            valid += begun & alive
        return valid, total

    # --- what was chosen ---

    @cached_property
    def _slots(self) -> dict[str, tuple[int, Floats]]:
        """Choice points of the program: readable name -> (position, probabilities of its options)."""
        slots: dict[str, tuple[int, Floats]] = {}
        clean = set(self.position[: self.num_clean_counters].tolist())
        for position, options in enumerate(self._options):
            if position not in clean or len(options) < 2:
                continue
            names = [
                option.emission.word if isinstance(option.emission, Say) else f"[{option.emission.fact}]"
                for option in options
            ]
            name = "|".join(names[:4]) + ("|..." if len(names) > 4 else "")
            while name in slots:
                name += "'"
            slots[name] = (position, np.array([option.probability for option in options]))
        return slots

    def slot_marginals(self) -> dict[str, Floats]:
        """The exact distribution of every fact (by its name) and every choice (by the words it starts
        with)."""
        marginals = {fact.name: np.array(fact.probabilities) for fact in self.facts}
        marginals.update({name: shares for name, (_, shares) in self._slots.items()})
        return marginals

    def slot_counts(self, ids: ArrayLike) -> dict[str, Ints]:
        """How often each value occurs in texts: facts at their first mention in a story, valid or not;
        choices as far as the story is valid."""
        ids = self._blocks(ids)
        num = len(ids)
        counts = {name: np.zeros(len(shares), dtype=np.int64) for name, shares in self.slot_marginals().items()}
        fact_of = np.full((len(self.facts), len(self.vocabulary)), -1, dtype=np.int64)
        for fact_index, fact in enumerate(self.facts):
            fact_of[fact_index, [self.word_id[word] for word in fact.words]] = np.arange(len(fact.words))
        counters, values = self._fresh(num)
        alive = np.ones(num, dtype=bool)
        mentioned = np.zeros((num, len(self.facts)), dtype=bool)
        option_of = np.full(self.arc_target.shape, -1, dtype=np.int64)
        for counter, word, fact_index, number in zip(
            self._branch_counter, self._branch_word, self._branch_fact, self._branch_option, strict=True
        ):
            at = [word] if word >= 0 else self._fact_words[fact_index, : len(self.facts[fact_index].words)]
            option_of[counter, at] = number
        widest = max(len(options) for options in self._options)
        tally = np.zeros(len(self._options) * widest, dtype=np.int64)
        for t in range(ids.shape[1]):
            words = ids[:, t]
            for fact_index, fact in enumerate(self.facts):
                value = fact_of[fact_index, words]
                new = (value >= 0) & ~mentioned[:, fact_index]
                counts[fact.name] += np.bincount(value[new], minlength=len(fact.words))
                mentioned[new, fact_index] = True
            probability, target, values = self._follow(counters, values, words)
            alive &= probability > 0
            codes = self.position[counters[alive]] * widest + option_of[counters[alive], words[alive]]
            tally += np.bincount(codes, minlength=tally.size)
            ends = words == END
            counters = np.where(alive & ~ends, target, self.start)
            values[ends], mentioned[ends], alive[ends] = -1, False, True
        for name, (position, shares) in self._slots.items():
            counts[name] += tally[position * widest : position * widest + len(shares)]
        return counts

    def slot_divergence(self, ids: ArrayLike) -> dict[str, float]:
        """KL(texts || law) of every slot in nats, from counts; nan for a slot that never occurs."""
        marginals = self.slot_marginals()
        divergences = {}
        for name, count in self.slot_counts(ids).items():
            if count.sum() == 0:
                divergences[name] = float("nan")
                continue
            share = count / count.sum()
            used = share > 0
            divergences[name] = float(np.sum(share[used] * np.log(share[used] / marginals[name][used])))
        return divergences

    def agreement(self, ids: ArrayLike, groups: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, dict[str, Any]]:
        """Do later mentions repeat the first one of their story? Whether or not the text is valid otherwise.

        A group lists, for each of its values, the words that speak of that value. For each group: `kept`
        and `total` repeated mentions, and per story (`stories_kept`, `stories`: those with a repeated
        mention). The entry `all` joins the groups: a story is kept if every group is.
        """
        ids = self._blocks(ids)
        num = len(ids)
        value_of = np.full((len(groups), len(self.vocabulary)), -1, dtype=np.int64)
        for group, members in enumerate(groups.values()):
            for value, words in enumerate(members):
                value_of[group, [self.word_id[word] for word in words]] = value
        first = np.full((num, len(groups)), -1, dtype=np.int64)
        kept_here, total_here = np.zeros_like(first), np.zeros_like(first)
        kept, total = np.zeros(len(groups), dtype=np.int64), np.zeros(len(groups), dtype=np.int64)
        stories_kept, stories = np.zeros_like(kept), np.zeros_like(kept)
        all_kept = all_stories = 0
        for t in range(ids.shape[1] + 1):
            if t < ids.shape[1]:
                told = value_of[:, ids[:, t]].T
                again = (told >= 0) & (first >= 0)
                total_here += again
                kept_here += again & (told == first)
                first = np.where((first < 0) & (told >= 0), told, first)
                closing = ids[:, t] == END
            else:
                closing = np.ones(num, dtype=bool)
            k, n = kept_here[closing], total_here[closing]
            kept += k.sum(0)
            total += n.sum(0)
            stories += (n > 0).sum(0)
            stories_kept += ((n > 0) & (k == n)).sum(0)
            all_stories += int((n > 0).any(1).sum())
            all_kept += int(((n > 0).any(1) & (k == n).all(1)).sum())
            first[closing], kept_here[closing], total_here[closing] = -1, 0, 0
        report: dict[str, dict[str, Any]] = {
            name: {
                "kept": int(kept[g]),
                "total": int(total[g]),
                "stories_kept": int(stories_kept[g]),
                "stories": int(stories[g]),
            }
            for g, name in enumerate(groups)
        }
        report["all"] = {
            "kept": int(kept.sum()),
            "total": int(total.sum()),
            "stories_kept": all_kept,
            "stories": all_stories,
        }
        return report
