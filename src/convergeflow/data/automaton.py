"""Text whose law is known exactly: programs that write words and remember facts, compiled to a unifilar automaton.

A state is (counter, values of the facts fixed so far), and the emitted word determines the next state. A fact is drawn
at its first mention and forced afterwards; which facts are fixed, the probabilities of a choice and the successors
depend on the counter alone. Hence the likelihood of a text is one walk, the entropy of a sequence is a sum over
counters, and the smoothed law (every text possible) is a sparse hidden Markov model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from convergeflow.data.program import Compiler, Fact, Floats, Ints, Piece, Say, Tables

END = 0
"""The id of the token that closes a story, in every vocabulary of this room."""

# Values of a fact: not fixed; or fixed by a context that is not seen, so that the next mention tells it.
_UNSET, _ANY = -1, -2


class Grammar(Tables):
    """A program of stories over a list of facts, compiled to tables.

    `vocabulary[0]` is the end token. A full stop closes a sentence; a sentence start is a counter that follows one, or
    an end token, and can go on with a word.
    """

    start = 0
    """The counter at which a story starts."""

    def __init__(self, program: Piece, facts: Sequence[Fact]) -> None:
        super().__init__(**Compiler(program, facts).tables())

    # --- walking ---

    @property
    def num_counters(self) -> int:
        return int(self.arc_target.shape[0])

    def _follow(self, counters: Ints, values: Ints, words: Ints) -> tuple[Floats, Ints, Ints]:
        """One clean step of many states: probability of the word (0 where impossible), new counters, new values."""
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
        """`num` sequences of `length` words, [num, length]; a row does not depend on how many others there are."""
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
        """-log P of each sequence in nats, [num]; infinite for a text that the program cannot write."""
        ids = self._sequences(ids)
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

        Each word is a clean step with probability 1 - eps; with eps it is any word of the vocabulary, after which the
        automaton stays where it is (1/2) or jumps to a sentence start with no facts fixed (1/2, uniform over them).
        """
        ids = self._sequences(ids)
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

        # A state that has been reached keeps some mass for ever (it can stay), so the sorted list of keys only grows.
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

    def _sequences(self, ids: ArrayLike) -> Ints:
        array = np.asarray(ids)
        if array.ndim == 1:
            array = array[None]
        array = array.astype(np.int64)
        if array.size and not 0 <= array.min() <= array.max() < len(self.vocabulary):
            raise ValueError(f"ids must lie in 0..{len(self.vocabulary) - 1}")
        return array

    # --- entropy ---

    def block_entropy(self, length: int) -> float:
        """H(X_1..X_length) in nats, exact: the sum of H(X_t | X_1..X_{t-1})."""
        occupied: Floats = np.zeros(self.num_counters)
        occupied[self.start] = 1.0
        entropies = np.empty(length)
        for t in range(length):
            entropies[t] = occupied @ self.choice_entropy
            flow = occupied[self._branch_counter] * self._branch_probability
            occupied = np.zeros(self.num_counters)
            np.add.at(occupied, self._branch_target, flow)
        return float(entropies.sum())

    # --- validity ---

    @cached_property
    def _contexts(self) -> tuple[Ints, Ints]:
        """Every sentence start of the clean law with its facts fixed to anything: counters and values."""
        clean = np.arange(self.num_clean_counters)
        counters = clean[np.isin(self.position[clean], self.position[self.starts])]
        return counters, np.where(self.remembers[counters], _ANY, _UNSET)

    def valid_sentences(self, ids: ArrayLike, rows_at_once: int = 256) -> tuple[Ints, Ints]:
        """Sentences that occur in some story, taken one by one, and all sentences: [num] each.

        Facts must agree inside the sentence, not with the rest of the text (see `valid_stories`). The cut last sentence
        of a sequence counts as valid if it can be continued.
        """
        ids = self._sequences(ids)
        parts = [self._valid_sentences(ids[first : first + rows_at_once]) for first in range(0, len(ids), rows_at_once)]
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
            closes = (words == self.full_stop) | (ends & begun)
            begun |= ~boundary
            total += closes
            valid += closes & ~ends & alive.any(1)
            reset = closes | boundary
            counters[reset], alive[reset], begun[reset] = first_counters, True, False
            values[reset] = first_values
        total += begun
        valid += begun & alive.any(1)
        return valid, total

    def valid_stories(self, ids: ArrayLike) -> tuple[Ints, Ints]:
        """Stories with positive probability and all stories of each block, [num] each.

        The cut last story counts too; it is valid if it can be continued.
        """
        ids = self._sequences(ids)
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
        """The exact distribution of every fact (by its name) and every choice (by the words it starts with)."""
        marginals = {fact.name: np.array(fact.probabilities) for fact in self.facts}
        marginals.update({name: shares for name, (_, shares) in self._slots.items()})
        return marginals

    def slot_counts(self, ids: ArrayLike) -> dict[str, Ints]:
        """How often each value occurs in texts.

        Facts count at their first mention in a story, valid or not; choices as far as the story is valid.
        """
        ids = self._sequences(ids)
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

    def agreement(self, ids: ArrayLike, groups: Iterable[Sequence[Sequence[str]]]) -> dict[str, int]:
        """Do later mentions repeat the first one of their story? Whether or not the text is valid otherwise.

        A group lists, for each of its values, the words that speak of that value. Counted over all groups: `kept` and
        `total` repeated mentions; `stories` with a repeated mention, and `stories_kept`, those whose mentions all
        agree.
        """
        ids = self._sequences(ids)
        groups = list(groups)
        value_of = np.full((len(groups), len(self.vocabulary)), -1, dtype=np.int64)
        for group, members in enumerate(groups):
            for value, words in enumerate(members):
                value_of[group, [self.word_id[word] for word in words]] = value
        first = np.full((len(ids), len(groups)), -1, dtype=np.int64)
        kept, total = np.zeros_like(first), np.zeros_like(first)  # in the story that is being read
        report = dict.fromkeys(("kept", "total", "stories_kept", "stories"), 0)
        closed = np.full((len(ids), 1), END, dtype=np.int64)  # the cut last story counts too
        for words_here in np.hstack([ids, closed]).T:
            told = value_of[:, words_here].T
            again = (told >= 0) & (first >= 0)
            total += again
            kept += again & (told == first)
            first = np.where((first < 0) & (told >= 0), told, first)
            ends = words_here == END
            repeated = ends & (total > 0).any(1)
            report["kept"] += int(kept[ends].sum())
            report["total"] += int(total[ends].sum())
            report["stories"] += int(repeated.sum())
            report["stories_kept"] += int((repeated & (kept == total).all(1)).sum())
            first[ends], kept[ends], total[ends] = -1, 0, 0
        return report
