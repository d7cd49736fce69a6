"""The yardstick and our code compute the same thing, and the records say what they must."""

from __future__ import annotations

import mmap
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from convergeflow.benchmarks import head, measure, picture, plain, sample, train
from convergeflow.benchmarks.models import Size, build, plain_twin

TINY = Size(32, 2, 2, 61, 12, sample_batch=3, train_batch=4, self_condition=0.5)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is measured in this process instead of three fresh ones: the jobs are the same, and seconds are saved."""
    jobs = {"head": head.memory, "sample": sample.memory, "train": train.memory}
    monkeypatch.setattr(measure, "in_fresh_process", lambda job, **arguments: jobs[job](**arguments))
    monkeypatch.setattr(measure, "GEMM_SIDE", 32)


def test_the_plain_network_is_ours() -> None:
    model = build(TINY).eval()
    rng = torch.Generator().manual_seed(0)
    x, condition = torch.randn(2, 3, TINY.length, TINY.width, generator=rng)
    gamma = torch.tensor([3.0, 5.0, 9.0])
    for given in (None, condition):
        ours = model(x, gamma, given).logits
        torch.testing.assert_close(plain_twin(model).logits(x, gamma, given), ours, rtol=1e-4, atol=1e-4)


def test_the_plain_sampler_gives_our_tokens() -> None:
    contest = sample.Contest(TINY, points=2)
    expected = contest.plain()
    for name, call in contest.named().items():
        assert torch.equal(call(), expected), name
    assert len(expected.unique()) > 10  # not a degenerate text


def test_the_plain_sampler_follows_the_data_form_of_the_step() -> None:
    """With one call per point its noise-form update is x_s = alpha_s mu + (sigma_s/sigma_t)(x - alpha_t mu)."""
    model = build(TINY).eval()
    twin = plain_twin(model)
    noise = torch.randn(1, TINY.length, TINY.width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gammas = torch.tensor([6.0, 3.0], dtype=torch.float64)
    with torch.no_grad():
        mu = twin.mean(twin.logits(noise.float(), gammas[:1], None)).double()
        alpha, sigma = torch.sigmoid(-gammas).sqrt(), torch.sigmoid(gammas).sqrt()
        x = alpha[1] * mu + sigma[1] / sigma[0] * (noise - alpha[0] * mu)
        expected = twin.logits(x.float(), gammas[1:], None).argmax(-1)
    assert torch.equal(plain.sample(twin, noise, gammas.tolist(), [0, 0], [1.0, 1.0]), expected)


def test_training_steps_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, rival = train.Ours(TINY), train.Plain(TINY)
    for _ in range(3):
        assert ours.step() == pytest.approx(rival.step(), rel=1e-5)
    mine = dict(ours.model.network.named_parameters())
    for name, value in rival.model.weights.items():
        if value.requires_grad:
            torch.testing.assert_close(mine[name].detach(), value.detach(), rtol=1e-4, atol=2e-6)


@pytest.mark.usefixtures("no_processes")
def test_records_have_the_promised_keys(tmp_path: Any) -> None:
    records = {
        "head": head.run(head.HeadSize(40, 16, 70), repeats=1),
        "sample": sample.run(TINY, repeats=1, points=1),
        "train": train.run(TINY, repeats=1),
    }
    common = {"speedup_vs_plain", "peak_rss_mb", "plain_peak_rss_mb", "gemm_peak_fraction", "tokens_equal"}
    promised = {
        "head": {
            "speedup_vs_plain_float64",
            "speedup_vs_plain_float32",
            "extra_mb",
            "plain_extra_mb",
            "gemm_peak_fraction",
        },
        "sample": common,
        "train": common,
    }
    for what, record in records.items():
        assert promised[what] <= record.keys()
        assert record.get("tokens_equal", True) is True
        picture.draw({"what": what, "name": "tiny", **record}, tmp_path / f"{what}.png")
        assert (tmp_path / f"{what}.png").stat().st_size > 1000
    assert records["head"]["value_error"] < 1e-5 and records["head"]["gradient_error"] < 1e-4


def test_alternation_takes_turns_and_leaves_out_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(wall=0.0, processor=0.0)
    clock.perf_counter, clock.process_time = lambda: clock.wall, lambda: clock.processor
    monkeypatch.setattr(measure, "time", clock)
    order: list[str] = []

    def case(name: str) -> None:
        order.append(name)
        # The first round is slow, as first rounds are; then 1, 5, 2 seconds, half of them on the processor.
        clock.wall += (100, 1, 5, 2)[order.count(name) - 1]
        clock.processor = clock.wall / 2

    times = measure.alternate({name: partial(case, name) for name in "ab"}, repeats=3, warm_up=1)
    assert order == list("abababab")
    assert times.wall == {"a": 2, "b": 2} and times.processor == {"a": 1, "b": 1}


def test_memory_is_measured_beyond_what_was_there() -> None:
    # Pages of its own: an allocator may serve a tensor from memory that earlier tests have left resident.
    with measure.PeakMemory() as watch, mmap.mmap(-1, 40 * 2**20) as pages:
        for start in range(0, len(pages), mmap.PAGESIZE):
            pages[start] = 1
    assert 38 < watch.extra < 60


def test_flops_of_the_paper_size() -> None:
    """Hand count: 452 GFLOP per call at 12 x 768, length 1024, V = 50257."""
    total = measure.head_flops(1024, 768, 50257) + measure.trunk_flops(1024, 1024, 768, 12)
    assert total == pytest.approx(452e9, rel=0.02)


def test_a_fresh_process_answers() -> None:
    found = measure.in_fresh_process("head", shape={"rows": 64, "width": 16, "vocabulary": 4096}, contestant="fused")
    assert 0 <= found["extra_mb"] < 50


def test_a_process_does_not_inherit_its_parents_peak() -> None:
    block = torch.ones(400 * 2**18)  # 400 MB that a child must not report as its own
    code = "from convergeflow.benchmarks import measure; print(measure.peak_of_process() - measure.resident())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    del block
    assert float(done.stdout) < 200
