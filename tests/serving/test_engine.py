"""The engine: the tokens of `sample` under any load, and nobody pays for another's failure."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from convergeflow.data.tokenizer import stories_tokenizer
from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.flow.guidance import Controls
from convergeflow.sampling.cohort import Cohort
from convergeflow.sampling.events import End
from convergeflow.sampling.settings import Freeze, Settings
from convergeflow.sampling.wrappers import Clamp
from convergeflow.serving.engine import Engine
from convergeflow.serving.limits import Limits
from convergeflow.serving.models import Served
from convergeflow.serving.ticket import Busy, Cancelled, Closing, Job, OutOfTime, Ticket
from convergeflow.systems import METHODS
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel
from convergeflow.systems.protocol import LanguageModel

LENGTH = 12


def served(model: LanguageModel, name: str = "m") -> Served:
    flow = model.as_flow()
    return Served(name, model, None if flow is None else flow.bind(), (), 0)


def flow_model(**changes: Any) -> ConvergeFlowModel:
    torch.manual_seed(3)
    values: dict[str, Any] = {"vocabulary": 218, "width": 32, "depth": 2, "heads": 2, "length": LENGTH, "dropout": 0.0}
    model = ConvergeFlowModel(ConvergeFlowConfig(**{**values, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.tokenizer = stories_tokenizer()
    return model.eval()


@pytest.fixture(scope="module")
def flow() -> Served:
    return served(flow_model())


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(Limits(rows=6, queue=100))
    made.start()
    yield made
    made.stop(20)
    assert not any(lane.is_alive() for lane in made.lanes)


SETTINGS = [
    Settings(nfe=6),
    Settings(nfe=9, controls=Controls(refine=2, scg=2.0)),
    Settings(nfe=5, self_condition="previous", temperature=0.7),
    Settings(nfe=12, controls=Controls(refine=3, scg=1.5), freeze=Freeze(weight=0.9, change=0.1)),
    Settings(nfe=7, self_condition="none", solver="kernel"),
    Settings(nfe=8, solver="heun", grid="closing", decode="prediction"),
]


def test_requests_of_all_kinds_get_the_tokens_they_have_alone(flow: Served, engine: Engine) -> None:
    known = Clamp(torch.tensor([4, 9] + [0] * (LENGTH - 2)), torch.tensor([True, True] + [False] * (LENGTH - 2)))
    jobs = [
        Job(flow, range(10 * number, 10 * number + 1 + number % 3), LENGTH, {"settings": settings, **more})
        for number, settings in enumerate(SETTINGS * 3)
        for more in ({}, {"clamp": known})
    ]
    random.Random(0).shuffle(jobs)
    tickets = [engine.submit(job) for job in jobs]
    for job, ticket in zip(jobs, tickets, strict=True):
        answer = ticket.result(60)
        alone = flow.model.sample(len(job.seeds), LENGTH, seeds=list(job.seeds), **job.arguments)
        assert torch.equal(answer.ids, alone.ids)
        assert answer.calls == alone.extras["calls"].tolist()
    assert engine.flows.counts.row_passes > 1.5 * engine.flows.counts.passes, "requests shared their passes"


def test_blocks_and_several_models_share_the_engine(flow: Served, engine: Engine) -> None:
    blocks = served(flow_model(block_length=4), "blocks")
    settings = Settings(nfe=20, self_condition="previous")
    jobs = [Job(each, [seed], LENGTH, {"settings": settings}) for seed in range(3) for each in (flow, blocks)]
    tickets = [engine.submit(job) for job in jobs]
    for job, ticket in zip(jobs, tickets, strict=True):
        alone = job.served.model.sample(1, LENGTH, seeds=job.seeds, settings=settings)
        assert torch.equal(ticket.result(60).ids, alone.ids)


def test_a_rival_runs_beside_flows(engine: Engine) -> None:
    cls = METHODS["mdlm"]
    torch.manual_seed(0)
    model = cls(cls.config_class(vocabulary=218, width=32, depth=1, heads=2, length=LENGTH, dropout=0.0))
    model.tokenizer = stories_tokenizer()
    rival = served(model, "mdlm")
    watched = engine.submit(Job(rival, [5, 6], LENGTH, {"nfe": 6}, watched=True))
    answer = watched.result(60)
    alone = model.sample(2, LENGTH, seeds=[5, 6], nfe=6)
    assert torch.equal(answer.ids, alone.ids) and answer.calls == [6, 6]
    assert [frame.step for frame in watched.frames] == list(range(6))


def test_memory_stays_flat(flow: Served, engine: Engine) -> None:
    """After 60 requests there are no more tensors than after 20, and none of the requests themselves."""

    def answered(seeds: range) -> list[weakref.ref[Ticket]]:
        # Unlike each other in settings: what is shared by the passes of one must not be kept for the next.
        jobs = [Job(flow, [seed], LENGTH, {"settings": SETTINGS[seed % 4]}, watched=seed % 2 == 0) for seed in seeds]
        tickets = [engine.submit(job) for job in jobs]
        for ticket in tickets:
            ticket.result(60)
        return [weakref.ref(ticket) for ticket in tickets]

    def size() -> int:
        engine.submit(Job(flow, [0], LENGTH, {"settings": SETTINGS[0]})).result(60)
        gc.collect()
        return sum(each.numel() for each in gc.get_objects() if type(each) is torch.Tensor)

    answered(range(20))
    before = size()
    gone = answered(range(20, 60))
    assert size() <= before + 4096, "a sample alone has 384 numbers of state, and its frames have more"
    assert not any(ticket() for ticket in gone)


class Poison(Exception):
    pass


def test_a_poisoned_request_fails_alone(flow: Served, engine: Engine) -> None:
    direct = served(flow_model(predictor="direct"), "direct")
    huge = Settings(nfe=8, controls=Controls(refine=3, scg=2.0))
    object.__setattr__(huge.controls, "scg", 1e300)  # no user can ask for it: settings have bounds
    bad = [
        Job(flow, [1], LENGTH, {"settings": huge}),  # overflows
        Job(direct, [1], LENGTH, {"settings": Settings(nfe=4, temperature=0.5, decode="prediction")}),  # in the pass
        Job(direct, [1], LENGTH, {"settings": Settings(nfe=4)}),  # when tokens are read off
        Job(flow, [1], LENGTH, {"settings": Settings(nfe=4), "clamp": Clamp(torch.zeros(3), torch.ones(3).bool())}),
    ]
    good = [Job(flow, [seed], LENGTH, {"settings": SETTINGS[seed % 3]}, watched=seed == 2) for seed in range(4)]
    good.append(Job(direct, [9], LENGTH, {"settings": Settings(nfe=4, decode="prediction")}))
    order = [*bad, *good]
    random.Random(1).shuffle(order)
    tickets = {id(job): engine.submit(job) for job in order}
    for job in good:
        alone = job.served.model.sample(1, LENGTH, seeds=job.seeds, **job.arguments)
        assert torch.equal(tickets[id(job)].result(60).ids, alone.ids)
    for job in bad:
        with pytest.raises(ConvergeFlowError, match=r"finite|no weights|no token weights|known tokens"):
            tickets[id(job)].result(60)
    assert not engine.flows.cohorts and not engine.flows.driver.cohorts


def test_a_prediction_that_is_not_finite_is_refused_as_by_sample(
    flow: Served, engine: Engine, monkeypatch: Any
) -> None:
    """The last state may be fine when the last prediction is not: one check serves `sample` and the server."""
    whole = Cohort.end

    def poisoned(self: Cohort) -> End:
        end = whole(self)
        mu = end.final.mu.clone()
        mu[1:] = float("nan")
        return replace(end, final=replace(end.final, mu=mu))

    monkeypatch.setattr(Cohort, "end", poisoned)
    said = []
    with pytest.raises(ConvergeFlowError) as refusal:
        flow.model.sample(2, LENGTH, seeds=[5, 6], settings=SETTINGS[0])
    said.append(str(refusal.value))
    with pytest.raises(ConvergeFlowError) as refusal:
        engine.submit(Job(flow, [5, 6], LENGTH, {"settings": SETTINGS[0]})).result(60)
    said.append(str(refusal.value))
    assert all("seed 6 is not finite" in line and "1 of the 2" in line for line in said), said


def test_a_mistake_of_the_engine_hangs_nobody(flow: Served, engine: Engine, monkeypatch: Any) -> None:
    job = Job(flow, [1], LENGTH, {"settings": SETTINGS[0]})
    with monkeypatch.context() as patch:
        patch.setattr(engine.flows.driver, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.submit(job).result(20)
    assert engine.submit(job).result(60).calls == [6]


def test_an_observer_that_fails_ends_its_own_request(flow: Served, engine: Engine, monkeypatch: Any) -> None:
    from convergeflow.serving import ticket as tickets

    def poisoned(self: Any, frame: Any) -> None:
        raise Poison

    monkeypatch.setattr(tickets.Delivered, "keep", poisoned)
    watched = engine.submit(Job(flow, [1], LENGTH, {"settings": SETTINGS[0]}, watched=True))
    other = engine.submit(Job(flow, [2], LENGTH, {"settings": SETTINGS[0]}))
    assert other.result(60).ids.shape == (1, LENGTH)
    with pytest.raises(Poison):
        watched.result(60)


def test_the_queue_is_bounded_and_says_when_to_come_back(flow: Served) -> None:
    engine = Engine(Limits(queue=3))  # not started: nothing leaves the queue
    job = Job(flow, [1], LENGTH, {"settings": SETTINGS[0]})
    held = [engine.submit(job) for _ in range(3)]
    with pytest.raises(Busy) as refused:
        engine.submit(job)
    assert 1 <= refused.value.seconds <= 60
    engine.start()
    assert all(ticket.result(60).calls == [6] for ticket in held)
    engine.stop(20)
    with pytest.raises(Closing):
        engine.submit(job)


def test_who_waits_for_nothing_takes_no_place_in_the_queue(flow: Served) -> None:
    engine = Engine(Limits(queue=3))  # not started: nothing leaves the queue by being made
    job = Job(flow, [1], LENGTH, {"settings": SETTINGS[0]})
    gone, late, there = (engine.submit(job) for _ in range(3))
    gone.cancel()
    late.deadline = time.monotonic() - 1
    held = [engine.submit(job), engine.submit(job)]
    with pytest.raises(Busy):
        engine.submit(job)
    for ticket, how in ((gone, Cancelled), (late, OutOfTime)):
        with pytest.raises(how):
            ticket.result(0)
    assert list(engine.flows.waiting) == [there, *held]


@pytest.mark.parametrize("method", ["convergeflow", "mdlm"])
def test_who_waits_is_told_in_time_that_it_will_not_be_in_time(flow: Served, method: str) -> None:
    engine = Engine(Limits(rows=2, seconds=30))
    engine.start()
    long: dict[str, Any] = {"settings": Settings(nfe=100_000, self_condition="none")}
    if method == "mdlm":
        cls = METHODS[method]
        model = cls(cls.config_class(vocabulary=218, width=32, depth=1, heads=2, length=LENGTH, dropout=0.0))
        flow, long = served(model, method), {"nfe": 100_000}
    running = engine.submit(Job(flow, [1, 2], LENGTH, long))
    waiting = engine.submit(Job(flow, [3, 4], LENGTH, long))
    waiting.deadline = time.monotonic() + 0.3
    with pytest.raises(OutOfTime):
        waiting.result(10)
    assert not running.over
    running.cancel()
    engine.stop(20)


def test_an_end_at_once_is_told_to_all(flow: Served) -> None:
    engine = Engine(Limits(rows=2))
    engine.start()
    long = Job(flow, [1, 2], LENGTH, {"settings": Settings(nfe=100_000, self_condition="none")})
    tickets = [engine.submit(long) for _ in range(3)]
    engine.end_at_once()
    for ticket in tickets:
        with pytest.raises(Closing, match="again"):
            ticket.result(10)
    with pytest.raises(Closing):
        engine.submit(long)
    engine.stop(20)
    assert not any(lane.is_alive() for lane in engine.lanes)


def test_cancelled_and_late_requests_leave(flow: Served, engine: Engine) -> None:
    long = Job(flow, [1], LENGTH, {"settings": Settings(nfe=100_000, self_condition="none")})
    running = engine.submit(long)
    while not engine.flows.running:
        time.sleep(0.01)
    queued = engine.submit(replace(long, seeds=range(6)))  # does not fit beside it
    running.cancel()
    queued.cancel()
    for ticket in (running, queued):
        with pytest.raises(Cancelled):
            ticket.result(20)
    late = engine.submit(long)
    late.deadline = time.monotonic() + 0.2
    with pytest.raises(OutOfTime, match="fewer"):
        late.result(20)
    assert engine.flows.counts.ended == {"answered": 0, "failed": 1, "cancelled": 2}


def test_a_reader_that_never_reads_stalls_nobody_and_keeps_the_latest_frames(flow: Served) -> None:
    engine = Engine(Limits(frames=5))
    engine.start()
    settings = Settings(nfe=40, self_condition="none")
    ticket = engine.submit(Job(flow, [1], LENGTH, {"settings": settings}, watched=True))
    assert ticket.result(60).calls == [40]
    assert [frame.step for frame in ticket.frames] == [35, 36, 37, 38, 39]
    assert ticket.frames[-1].of_sample(0)["tokens"] == ticket.answer.ids[0].tolist()  # type: ignore[union-attr]
    engine.stop(20)


def test_stopping_finishes_what_runs_and_what_waits(flow: Served) -> None:
    engine = Engine(Limits(rows=2))
    engine.start()
    tickets = [engine.submit(Job(flow, [seed], LENGTH, {"settings": SETTINGS[1]})) for seed in range(8)]
    engine.stop(60)
    assert all(ticket.over and ticket.failure is None for ticket in tickets)


def test_requests_from_many_threads_are_not_mixed_up(flow: Served, engine: Engine) -> None:
    found: dict[int, list[int]] = {}

    def ask(seed: int) -> None:
        job = Job(flow, [seed], LENGTH, {"settings": SETTINGS[seed % 3]})
        found[seed] = engine.submit(job).result(60).ids[0].tolist()

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, ids in found.items():
        assert ids == flow.model.sample(1, LENGTH, seeds=[seed], settings=SETTINGS[seed % 3]).ids[0].tolist()
    assert len(found) == 24


def test_limits_are_changed_by_name_and_refused_by_name() -> None:
    assert Limits().changed(["queue=7", "seconds=1.5"]) == Limits(queue=7, seconds=1.5)
    for wrong, says in (
        ("quue=1", "did you mean 'queue'"),
        ("queue", "name=value"),
        ("queue=x", "number"),
        ("rows=0", "above 0"),
        ("grace=inf", "above 0"),
        ("frames=99999999999999999999", "below"),
    ):
        with pytest.raises(UserError, match=says):
            Limits().changed([wrong])
