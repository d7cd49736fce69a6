"""The harness runs a local task on a model of this package without a network, and its numbers are the model's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

import convergeflow as cf
from convergeflow.interop.lm_eval import ConvergeFlowLM

sys.path.insert(0, str(Path(__file__).parent))
from lm_eval_task import NAME, write_task


def asked(*arguments: Any) -> SimpleNamespace:
    return SimpleNamespace(args=arguments)


@pytest.mark.slow
def test_a_local_task_runs_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    import lm_eval
    from lm_eval.tasks import TaskManager

    write_task(tmp_path)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(
        "convergeflow",
        model_args={"pretrained": "stories-small", "repeats": 16, "greedy": False, "device": "cpu"},
        tasks=[NAME],
        task_manager=manager,
        bootstrap_iters=0,
    )
    assert found is not None
    assert found["results"][NAME]["acc,none"] == 1.0
    assert found["config"]["convergeflow"]["likelihood"] == "variational diffusion bound"


def test_an_exact_system_gives_exact_conditional_likelihoods() -> None:
    model = cf.load("stories-ar", device="cpu")
    harness = ConvergeFlowLM(model, greedy=False)
    context, answer = "Once there was a little girl named", " Mia. She had a red ball."
    ((found, greedy),) = harness.loglikelihood([asked(context, answer)])
    assert model.tokenizer is not None
    before, whole = (torch.tensor([model.tokenizer.encode(text)]) for text in (context, context + answer))
    assert found == pytest.approx(model.bound(before).nats[0] - model.bound(whole).nats[0], rel=1e-5)
    assert not greedy
    # The chain rule: an answer in two parts.
    first, second = harness.loglikelihood(
        [asked(context, " Mia. She had"), asked(context + " Mia. She had", " a red ball.")]
    )
    assert first[0] + second[0] == pytest.approx(found, rel=1e-4)
    (rolled,) = harness.loglikelihood_rolling([asked(context + answer)])
    assert rolled == pytest.approx(-model.bound(whole).nats[0], rel=1e-5)


def test_a_flow_answers_by_its_bound_and_says_what_it_would_write() -> None:
    harness = ConvergeFlowLM("stories-small", device="cpu", repeats=2)
    known = "Once there was a clever girl named Rosa. She"
    (text,) = harness.generate_until([asked(known, {"until": ["."], "max_gen_toks": 12})])
    assert text.startswith(" ") and "." not in text and len(text.split()) <= 12
    # What it writes at the length of the pair is greedy, and nothing else is.
    context, whole = harness._pair(known, " had a red ball.")
    written = harness._sample([context], len(whole))[0]
    answer = harness.tokens.decode(written)[len(known) :]
    (_, greedy), (_, other) = harness.loglikelihood([asked(known, answer), asked(known, " had a golden lamp .")])
    assert greedy and (not other or "golden lamp" in answer)
    assert harness.loglikelihood([asked("", known)])[0][0] < 0


def test_what_does_not_fit_loses_its_beginning_and_wrong_options_are_refused() -> None:
    harness = ConvergeFlowLM("stories-ar", device="cpu", greedy=False)
    long = "Mia was a bold girl. " * 20
    context, whole = harness._pair(long, "Now she was happy.")
    assert len(whole) == 64 and whole[-1] == harness.tokens.encode(".")[0] and whole[: len(context)] == context
    assert ConvergeFlowLM("stories-ar", device="cuda:0").model.device.type in ("cpu", "cuda"), "the harness's default"
    with pytest.raises(cf.UserError, match="unknown device"):
        ConvergeFlowLM("stories-ar", device="gpu")
    with pytest.raises(cf.UserError, match="unknown option"):
        ConvergeFlowLM("stories-small", device="cpu", nef=3)
    with pytest.raises(cf.UserError, match="nearest words"):
        harness.loglikelihood([asked("The capital of France is", " Paris")])
