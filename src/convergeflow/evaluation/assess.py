"""Samples to numbers: score, measure, and put real text beside every value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from convergeflow.data.tokenizer import Tokenizer
from convergeflow.errors import UserError
from convergeflow.evaluation.estimate import Estimate, Floats, finite, mean
from convergeflow.evaluation.generative import Scored, mean_nll, perplexity
from convergeflow.evaluation.likelihood import bits_per_byte, bytes_per_token
from convergeflow.evaluation.metrics import measure, measure_exact, sample_entropies
from convergeflow.evaluation.protocol import Protocol
from convergeflow.evaluation.reference import Reference
from convergeflow.evaluation.scorers import END_OF_TEXT, Advance, Scorer, Texts, scorer_named, silent
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.systems.protocol import LanguageModel, Samples


@dataclass(frozen=True)
class SampleSet:
    """Samples of one model and setting, from memory or from a file."""

    ids: NDArray[np.int64]
    seeds: list[int]
    calls: list[int]
    """Network calls of each sample, counted while it was made."""
    settings: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    """Name, hash of the weights, method."""
    tokenizer: Tokenizer | None = None
    documents: list[list[str]] | None = None
    """The texts, where they came without a tokenizer."""
    extras: dict[str, NDArray[Any]] = field(default_factory=dict)
    """What else the sampler said of each sample, such as the ids under other token rules (`ids_NAME`)."""

    @classmethod
    def of(cls, samples: Samples, model: Mapping[str, Any], tokenizer: Tokenizer | None) -> SampleSet:
        """From what `model.sample` returned."""
        calls = samples.extras.get("calls")
        counted = [samples.nfe] * len(samples.seeds) if calls is None else [int(call) for call in calls]
        extras = {name: value.numpy() for name, value in samples.extras.items()}
        return cls(
            samples.ids.numpy(), list(samples.seeds), counted, samples.settings, dict(model), tokenizer, extras=extras
        )

    @classmethod
    def from_lines(cls, lines: Sequence[Mapping[str, Any]], tokenizer: Tokenizer | None) -> SampleSet:
        """From the lines of a sample file (`sample_file.read_samples`)."""
        lengths = {len(line["ids"]) for line in lines}
        if len(lengths) > 1:
            raise UserError(f"the samples have different lengths ({min(lengths)} to {max(lengths)}); score them apart")
        models = list(dict.fromkeys(str(line.get("model", "unknown")) for line in lines))
        if len(models) > 1:
            raise UserError(f"the file holds samples of several models ({', '.join(models[:3])}); score them apart")
        name, _, weights = models[0].partition("@")
        texts = [line.get("text") for line in lines]
        documents = None
        if tokenizer is None and all(isinstance(text, str) for text in texts):
            documents = [str(text).split(END_OF_TEXT) for text in texts]
        return cls(
            np.array([line["ids"] for line in lines], dtype=np.int64),
            [int(line.get("seed", index)) for index, line in enumerate(lines)],
            [int(line.get("nfe", 0)) for line in lines],
            dict(lines[0].get("settings") or {}),
            {"name": name, "weights": weights or None},
            tokenizer,
            documents,
        )

    @classmethod
    def joined(cls, parts: Sequence[SampleSet]) -> SampleSet:
        """Batches of one model and setting as one set."""
        first = parts[0]
        return cls(
            np.concatenate([part.ids for part in parts]),
            [seed for part in parts for seed in part.seeds],
            [call for part in parts for call in part.calls],
            first.settings,
            first.model,
            first.tokenizer,
            extras={name: np.concatenate([part.extras[name] for part in parts]) for name in first.extras},
        )

    def texts(self) -> Texts:
        """As scorers take them."""
        if self.documents is not None:
            return Texts(self.ids, self.documents)
        return Texts.from_ids(self.ids, self.tokenizer)


@dataclass(frozen=True)
class ScorerView:
    """One scorer's view of one set of texts under one protocol."""

    scored: Scored
    nll: Estimate
    gen_ppl: Estimate
    entropies: Floats
    """Of each sample; nan where the protocol skips it."""

    @property
    def entropy(self) -> Estimate:
        """Unigram entropy, over the samples that count."""
        return mean(self.entropies[np.isfinite(self.entropies)])

    def headline(self) -> dict[str, Any]:
        """Gen. PPL and entropy with their errors."""
        return {
            "gen_ppl": finite(self.gen_ppl.value),
            "gen_ppl_se": finite(self.gen_ppl.se),
            "entropy": finite(self.entropy.value),
            "entropy_se": finite(self.entropy.se),
            "n": len(self.scored.nll),
        }

    def per_sample(self) -> dict[str, list[Any]]:
        """Nats, scored tokens and entropy of each sample."""
        return {
            "nll": [round(float(value), 6) for value in self.scored.nll],
            "tokens": self.scored.tokens.tolist(),
            "entropy": [round(value, 6) if value == value else None for value in self.entropies.tolist()],
        }


class Assessor:
    """A scorer and a reference; the real text is scored once per protocol, however many sets of samples follow."""

    def __init__(self, scorer: Scorer, reference: Reference | None) -> None:
        self.scorer, self.reference = scorer, reference
        self._real: dict[str, ScorerView | None] = {}
        self._measured: tuple[SampleSet, dict[str, Any], dict[str, Any] | None] | None = None

    @property
    def num_real(self) -> int:
        """How many real texts there are beside the samples."""
        return 0 if self.reference is None or self.reference.real is None else len(self.reference.real)

    def check(self, model: LanguageModel, protocols: Sequence[Protocol]) -> None:
        """Score the last tokens that a model knows: what the scorer refuses, it refuses before samples are made."""
        tokenizer = model.tokenizer
        size = int(model.config.vocabulary) if tokenizer is None else tokenizer.size
        texts = Texts.from_ids(np.arange(max(0, size - 4), size)[None], tokenizer)
        for protocol in protocols:
            self.scorer.score(texts, protocol)

    def assess(self, samples: SampleSet, protocol: Protocol, *, progress: Advance = silent) -> dict[str, Any]:
        """Everything that is measured of a set of samples, as JSON values; `progress` counts the texts scored."""
        reference = self.reference
        if reference is not None and int(samples.ids.max()) >= reference.vocabulary:
            raise UserError(
                f"the samples have ids beyond the {reference.vocabulary} of the corpus {reference.name}: "
                "give the `corpus` they belong to"
            )
        here = self.read(samples.texts(), protocol, progress)
        real = self.real(protocol, progress)
        metrics, exact = self._measure(samples)
        valid = metrics.get("valid")
        shown = {} if valid is None else {"valid": valid["value"], "valid_se": valid["se"]}
        return {
            **here.headline(),
            "nfe": max(samples.calls),
            "protocol": protocol.id,
            "scorer": self.scorer.name,
            **shown,
            "nll": finite(here.nll.value),
            "nll_se": finite(here.nll.se),
            "length": int(samples.ids.shape[1]),
            "real": None if real is None else real.headline() | _real_share(valid),
            "metrics": metrics,
            "exact": exact,
            "likelihood": None,
            "corpus": {} if reference is None else reference.describe(),
            "model": samples.model,
            "sampling": samples.settings,
            "seeds": describe_seeds(samples.seeds),
            "calls": {"least": min(samples.calls), "most": max(samples.calls), "mean": float(np.mean(samples.calls))},
            "scorer_details": self.scorer.describe(),
            "protocol_details": protocol.describe(),
            "arithmetic": self.scorer.arithmetic(protocol),
            "scored_tokens": int(here.scored.tokens.sum()),
            "truncated": here.scored.truncated,
            "empty": here.scored.empty,
            "per_sample": here.per_sample(),
        }

    def _measure(self, samples: SampleSet) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """What does not depend on the protocol, kept for the next one."""
        if self.reference is None:
            return {}, None
        if self._measured is None or self._measured[0] is not samples:
            metrics, exact = measure(samples.ids, self.reference), None
            if self.reference.law is not None:
                table, exact = measure_exact(samples.ids, self.reference)
                metrics |= table
            self._measured = (samples, metrics, exact)
        return self._measured[1], self._measured[2]

    def real(self, protocol: Protocol, progress: Advance = silent) -> ScorerView | None:
        """The real text under the same scorer and protocol."""
        if protocol.id not in self._real:
            reference = self.reference
            self._real[protocol.id] = (
                None
                if reference is None or reference.real is None
                else self.read(Texts.from_ids(reference.real, reference.tokenizer), protocol, progress)
            )
        return self._real[protocol.id]

    def read(self, texts: Texts, protocol: Protocol, progress: Advance = silent) -> ScorerView:
        """What the scorer says of texts, with their unigram entropies."""
        scored = self.scorer.score(texts, protocol, progress)
        rows: Sequence[Any] = list(texts.ids)
        if protocol.entropy_on == "retokenised" and scored.retokenised is not None:
            rows = scored.retokenised
        entropies = sample_entropies(rows)
        if protocol.skip_empty:
            entropies[[len(row) == 0 for row in scored.retokenised or rows]] = np.nan
        return ScorerView(
            scored, mean_nll(scored, protocol.aggregate), perplexity(scored, protocol.aggregate), entropies
        )


def assessor_for(
    reference: Reference | None,
    scorer: str = "",
    *,
    device: str = "auto",
    say: Callable[[str], None] = lambda said: None,
) -> Assessor:
    """With a scorer by name; without one, the law where it is known, else the scorer that needs no network."""
    name = scorer or ("exact" if reference is not None and reference.law is not None else "smollm2")
    return Assessor(scorer_named(name, device=device, say=say), reference)


def _real_share(valid: Mapping[str, Any] | None) -> dict[str, Any]:
    return {} if valid is None else {"valid": valid.get("real"), "valid_se": valid.get("real_se")}


def describe_seeds(seeds: Sequence[int]) -> dict[str, Any]:
    """Consecutive seeds as a range, others as a list."""
    if len(seeds) and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return {"first": int(seeds[0]), "count": len(seeds)}
    return {"list": [int(seed) for seed in seeds], "count": len(seeds)}


def likelihood_of(
    model: LanguageModel, reference: Reference | None, *, draws: int, seed: int = 0, progress: Advance = silent
) -> dict[str, Any]:
    """The bound of a model on the reference's real text, as JSON values; refused where a method has none."""
    if reference is None or reference.real is None:
        raise UserError("the likelihood bound needs held-out text: give a `corpus`")
    tokens = torch.from_numpy(np.asarray(reference.real, dtype=np.int64))
    stream = RowDraws([derive_seed(seed, "bound", row) for row in range(len(tokens))])
    found = model.bound(tokens, draws=stream, repeats=draws, progress=progress)
    values: dict[str, Any] = {
        "nats_per_token": found.nats_per_token,
        "standard_error": finite(found.standard_error),
        "draws": found.draws,
        "kind": found.kind,
        "tokens": found.tokens,
        "bits_per_byte": None,
    }
    if reference.tokenizer is not None:
        per_token = bytes_per_token(tokens.numpy(), reference.tokenizer)
        values |= {
            "bytes_per_token": per_token,
            "bits_per_byte": bits_per_byte(found.nats_per_token, per_token),
            "bits_per_byte_se": finite(bits_per_byte(found.standard_error, per_token)),
        }
    if reference.law is not None:
        entropy = reference.law.block_entropy(tokens.shape[1]) / tokens.shape[1]
        values |= {"entropy_of_the_data": entropy, "kl_at_most": found.nats_per_token - entropy}
    return values
