"""What a flow looks like at a grid point: one schema for live streaming, traces, replays and figures.

`Frames` is an observer: the sampler calls it after the prediction at every grid point, at no cost in network calls. A
frame holds what a reader can be shown of every position: its token, the leading weights, the two nearest embeddings and
the entropy of the weights. `Frame.of_sample` is the same as JSON values, and a recording is a whole run of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convergeflow.data.tokenizer import Tokenizer
from convergeflow.sampling.cohort import Step
from convergeflow.sampling.decoding import Decoded, decode
from convergeflow.systems.protocol import Samples
from convergeflow.systems.rival import TokenStep

FORMAT = 1
"""Of frames and recordings; a reader refuses others."""
LEADING = 5
"""How many of the largest weights a frame keeps."""
CELLS = 1 << 26
"""Logits that are materialised at once."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Frame:
    """All rows of a request at one grid point; arrays are [rows, positions], those of the leaders have a third axis."""

    step: int
    steps: int
    t: float
    calls: int
    """Network calls so far."""
    rows: list[int]
    """Which samples these are; finished ones are left out."""
    block: int
    """The number of the block that this state is."""
    start: int
    """The position of its first token in the text."""
    token: Array
    log_snr: float = math.nan
    nearest: Array | None = None
    """||x - alpha e_j||/(sigma sqrt d) of the nearest embedding."""
    second: Array | None = None
    entropy: Array | None = None
    """Of the weights, in nats."""
    top_token: Array | None = None
    """The tokens of the largest weights, the largest first."""
    top_weight: Array | None = None
    agreement: Mapping[str, Array] = field(default_factory=dict)
    """Per row, the share of positions on which each pair of token rules agrees."""

    @classmethod
    def of(cls, step: Step | TokenStep, rows: Sequence[int], start: int = 0) -> Frame:
        """From what an observer is shown; a rival shows its tokens alone."""
        if isinstance(step, TokenStep):
            tokens = step.tokens.cpu().numpy()
            return cls(step.index, step.num_steps, step.t, step.calls, list(rows), 0, start, tokens)
        distances = step.distances()
        assert distances.second_distance is not None
        found: dict[str, Any] = {"token": distances.token}
        if step.last.token is not None:
            found |= {"token": step.last.token} | _leaders(step)
        found |= {"nearest": distances.distance, "second": distances.second_distance}
        return cls(
            step=step.index,
            steps=step.num_steps,
            t=step.t,
            calls=step.calls,
            rows=list(rows),
            block=step.block,
            start=start,
            log_snr=float(-step.at.gamma[0]),
            agreement=_agreement(step),
            **{name: value.cpu().numpy() for name, value in found.items()},
        )

    def of_sample(self, sample: int) -> dict[str, Any]:
        """One sample's frame as JSON values, rounded to what a screen can show."""
        row = self.rows.index(sample)
        shown = {
            "step": self.step,
            "steps": self.steps,
            "t": _rounded(self.t, 6),
            "log_snr": None if math.isnan(self.log_snr) else _rounded(self.log_snr, 4),
            "calls": self.calls,
            "block": self.block,
            "start": self.start,
            "tokens": self.token[row].tolist(),
        }
        for name in ("nearest", "second", "entropy"):
            values = getattr(self, name)
            shown[name] = None if values is None else _list(values[row], 3)
        shown["top_tokens"] = None if self.top_token is None else self.top_token[row].tolist()
        shown["top_weights"] = None if self.top_weight is None else _list(self.top_weight[row], 4)
        shown["agreement"] = {pair: _rounded(float(shares[row]), 4) for pair, shares in self.agreement.items()}
        return shown


@dataclass
class Frames:
    """An observer that makes frames, keeps them, and numbers samples and positions across micro-batches and blocks."""

    frames: list[Frame] = field(default_factory=list)
    _first: int = field(default=0, init=False)
    """The first sample of the micro-batch."""
    _size: int = field(default=0, init=False)
    _start: int = field(default=0, init=False)
    _length: int = field(default=0, init=False)

    def __call__(self, step: Any) -> None:
        """Take down one grid point."""
        self.keep(self._next(step))

    def keep(self, frame: Frame) -> None:
        """What is done with a frame; a subclass may send it somewhere."""
        self.frames.append(frame)

    def rows(self, tokenizer: Tokenizer | None = None) -> Iterator[dict[str, Any]]:
        """The flow as a table, a row per step, sample and position: what `pandas.DataFrame` takes.

        With a tokenizer there is a column `word`. What a predictor does not have, and a rival shows, is None.
        """
        words = None if tokenizer is None else tokenizer.tokens()
        for frame in self.frames:
            about = {"step": frame.step, "t": frame.t, "log_snr": frame.log_snr, "calls": frame.calls}
            weight = None if frame.top_weight is None else frame.top_weight[..., 0]
            columns = {"weight": weight, "entropy": frame.entropy, "nearest": frame.nearest, "second": frame.second}
            for row, sample in enumerate(frame.rows):
                for place, token in enumerate(frame.token[row].tolist()):
                    found = {**about, "sample": sample, "position": frame.start + place, "token": token}
                    if words is not None:
                        found["word"] = words[token] if token < len(words) else None
                    shown = {name: None if all_ is None else float(all_[row, place]) for name, all_ in columns.items()}
                    yield found | shown

    def _next(self, step: Step | TokenStep) -> Frame:
        if isinstance(step, TokenStep):
            rows, block, before = list(range(len(step.tokens))), 0, 0
        else:
            rows, block = step.rows.tolist(), step.block
            before = 0 if step.before is None else step.before.shape[1]
        if step.index == 0:
            if block == 0:
                self._first, self._size, self._start = self._first + self._size, len(rows), before
            elif isinstance(step, Step):
                self._start += self._length
        self._length = step.tokens.shape[1] if isinstance(step, TokenStep) else step.x_t.shape[1]
        return Frame.of(step, [self._first + row for row in rows], self._start)


def recording(
    frames: Iterable[Frame], samples: Samples, tokenizer: Tokenizer | None, known: Sequence[int] = (), **about: Any
) -> dict[str, Any]:
    """A run as JSON values: who made it and how, its words, and every sample with its frames and its end.

    `known` are the positions whose words were given.
    """
    made = []
    frames = list(frames)
    for number, ids in enumerate(samples.ids.tolist()):
        own = [frame.of_sample(number) for frame in frames if number in frame.rows]
        made.append(
            {
                "seed": samples.seeds[number],
                "calls": int(samples.extras["calls"][number]),
                "tokens": ids,
                "text": " ".join(map(str, ids)) if samples.texts is None else samples.texts[number],
                "known": list(known),
                "frames": own,
            }
        )
    return {"format": FORMAT, **about, "samples": made, **words_of(tokenizer, _used(made))}


def words_of(tokenizer: Tokenizer | None, ids: Iterable[int]) -> dict[str, Any]:
    """The words of token ids as a page shows them; `spaced` says whether words need spaces between them."""
    if tokenizer is None:
        return {"words": {str(ident): str(ident) for ident in sorted(set(ids))}, "spaced": True}
    spaced, names, words = tokenizer.kind == "word", tokenizer.tokens(), {}
    for ident in sorted(set(ids)):
        if ident == tokenizer.end_id:
            words[str(ident)] = "\u23ce"
        elif ident >= len(names):
            words[str(ident)] = "\u2591"  # a mask
        else:
            words[str(ident)] = names[ident] if spaced else tokenizer.decode([ident])
    return {"words": words, "spaced": spaced}


def _used(samples: Sequence[Mapping[str, Any]]) -> set[int]:
    used: set[int] = set()
    for sample in samples:
        used.update(sample["tokens"])
        for frame in sample["frames"]:
            used.update(frame["tokens"])
            for leaders in frame["top_tokens"] or ():
                used.update(leaders)
    return used


def _leaders(step: Step) -> dict[str, Tensor]:
    """The largest weights and the entropy of all of them, some rows at a time."""
    assert step.last.token is not None and step.last.top_weight is not None
    tokens, weights, entropies = [], [], []
    for arrival in step.arrivals:
        log_f, x = arrival.last.log_f, arrival.x
        at = arrival.point.at.expand(len(x))
        size = max(1, CELLS // (x.shape[1] * len(step.table)))
        for first in range(0, len(x), size):
            rows = slice(first, first + size)
            log_w = log_f[rows].logits(x[rows], at[rows]).double().log_softmax(-1)
            w = log_w.exp()
            top = w.topk(min(LEADING, w.shape[-1]), dim=-1)
            tokens.append(top.indices)
            weights.append(top.values)
            entropies.append(-(w * log_w.clamp_min(-1e4)).sum(-1))
    top_token, top_weight, entropy = torch.cat(tokens), torch.cat(weights), torch.cat(entropies)
    # A known or settled word skips the head, which may think otherwise.
    held = step.last.top_weight == 1.0
    top_token[..., 0] = torch.where(held, step.last.token, top_token[..., 0])
    top_weight = torch.where(held[..., None], torch.zeros_like(top_weight), top_weight)
    top_weight[..., 0] = torch.where(held, torch.ones_like(entropy), top_weight[..., 0])
    return {"top_token": top_token, "top_weight": top_weight, "entropy": torch.where(held, 0.0, entropy)}


def _agreement(step: Step) -> dict[str, Array]:
    if not step.arrivals:
        return {}
    end = step.arrivals[0].predictor.schedule(torch.ones((), dtype=torch.float64))
    found = decode(step.last, step.x_t, step.at, end, step.table).tokens
    each = [Decoded({rule: tokens[row] for rule, tokens in found.items()}).agreements() for row in range(len(step.x_t))]
    return {pair: np.array([shares[pair] for shares in each]) for pair in each[0]}


def _rounded(value: float, digits: int) -> float | None:
    return round(value, digits) if math.isfinite(value) else None


def _list(values: Array, digits: int) -> list[Any]:
    """Nested lists of short numbers; what is not finite becomes null."""
    whole = np.round(values.astype(np.float64), digits).astype(object)
    whole[~np.isfinite(values)] = None
    return list(whole.tolist())
