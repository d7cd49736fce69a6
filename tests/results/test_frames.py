"""Frames: what they say of a state, held against brute force on an exact predictor."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch

from convergeflow.data.tokenizer import byte_tokenizer, stories_tokenizer
from convergeflow.flow.guidance import Controls
from convergeflow.flow.schedule import Linear
from convergeflow.randomness import RowDraws
from convergeflow.results.frames import Frame, Frames, recording, words_of
from convergeflow.sampling.cohort import Step
from convergeflow.sampling.integration import integrate
from convergeflow.sampling.settings import Settings
from convergeflow.sampling.wrappers import Clamp
from convergeflow.systems.protocol import Samples
from convergeflow.systems.rival import TokenStep
from exact_predictor import ExactPredictor

PRIOR = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01])


def observed(settings: Settings, **how: Any) -> tuple[list[Step], Frames, Any]:
    steps: list[Step] = []
    frames = Frames()

    def observe(step: Step) -> None:
        steps.append(step)
        frames(step)

    predictor = ExactPredictor(PRIOR, 16, Linear())
    noise = RowDraws(range(3)).normal(4, 16, dtype=torch.float64)
    return steps, frames, integrate(predictor, settings, noise, observe=observe, **how)


PLAIN = Settings(nfe=6, controls=Controls(scg=0.0))


def test_leading_weights_and_entropy_are_those_of_the_posterior() -> None:
    steps, frames, _ = observed(PLAIN)
    for step, frame in zip(steps, frames.frames, strict=True):
        # Bayes' rule, written out: prior times the Gaussian density of the state around every embedding.
        x, alpha, sigma = step.x_t, float(step.at.alpha[0]), float(step.at.sigma[0])
        squared = (x[:, :, None, :] - alpha * step.table).square().sum(-1)
        w = (PRIOR.double().log() - squared / (2 * sigma**2)).softmax(-1)
        assert frame.top_weight is not None and frame.top_token is not None and frame.entropy is not None
        ranked = w.sort(-1, descending=True)
        assert np.allclose(frame.top_weight, ranked.values[..., :5].numpy(), atol=1e-9)
        assert np.array_equal(frame.top_token[..., 0], ranked.indices[..., 0].numpy())
        assert np.allclose(frame.entropy, torch.special.entr(w).sum(-1).numpy(), atol=1e-9)
        root = squared.sqrt().sort(-1).values / (sigma * math.sqrt(x.shape[-1]))
        assert frame.nearest is not None and frame.second is not None
        assert np.allclose(frame.nearest, root[..., 0].numpy()) and np.allclose(frame.second, root[..., 1].numpy())


def test_a_frame_of_a_sample_is_plain_json_and_the_last_one_holds_the_tokens() -> None:
    _, frames, end = observed(PLAIN)
    last = frames.frames[-1]
    for sample in range(3):
        shown = json.loads(json.dumps(last.of_sample(sample), allow_nan=False))
        assert shown["tokens"] == end.decoded.by("weight")[sample].tolist()
        assert shown["calls"] == 6 and shown["step"] == 5 and shown["steps"] == 6
        assert len(shown["top_tokens"]) == 4 and len(shown["top_weights"][0]) == 5
        agreed = (end.decoded.by("weight")[sample] == end.decoded.by("distance")[sample]).double().mean()
        assert shown["agreement"]["weight=distance"] == round(float(agreed), 4)


def test_a_known_word_is_shown_as_certain() -> None:
    known = torch.tensor([True, False, False, False])
    _, frames, _ = observed(PLAIN, clamp=Clamp(torch.tensor([6, 0, 0, 0]), known))
    first = frames.frames[0].of_sample(1)
    assert first["tokens"][0] == 6 and first["top_tokens"][0][0] == 6
    assert first["top_weights"][0] == [1.0, 0.0, 0.0, 0.0, 0.0] and first["entropy"][0] == 0.0
    assert first["top_weights"][1][0] < 1.0


def test_samples_are_numbered_across_micro_batches() -> None:
    frames = Frames()
    for size in (2, 1):
        for index in range(2):
            frames(TokenStep(index, 2, 0.5, torch.zeros(size, 3, dtype=torch.long), index + 1))
    assert [frame.rows for frame in frames.frames] == [[0, 1], [0, 1], [2], [2]]
    shown = frames.frames[-1].of_sample(2)
    assert shown["tokens"] == [0, 0, 0] and shown["top_tokens"] is None and shown["nearest"] is None


def test_a_recording_names_every_word_it_shows() -> None:
    tokenizer = stories_tokenizer()
    tokens = torch.tensor([[1, 2, 0]])
    samples = Samples(tokens, [7], 1, {}, [tokenizer.decode([1, 2, 0])], {"calls": torch.tensor([1])})
    frame = Frame(0, 1, 0.5, 1, [0], 0, 0, np.array([[3, 2, tokenizer.size]]))
    made = recording([frame], samples, tokenizer, [1], model="m")
    assert made["words"] == {
        "0": "\u23ce",
        **{str(i): tokenizer.tokens()[i] for i in (1, 2, 3)},
        str(tokenizer.size): "\u2591",
    }
    assert made["spaced"] and made["samples"][0]["known"] == [1] and made["samples"][0]["seed"] == 7
    assert words_of(byte_tokenizer(), [32, 97])["words"] == {"32": " ", "97": "a"}
