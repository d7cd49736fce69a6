"""A run for a text that nobody prepared: what is chosen, that it is told, and that what is given stays."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from convergeflow import zoo
from convergeflow.data.prepare import prepare
from convergeflow.data.unprepared import Decision, look, settings
from convergeflow.errors import UserError
from convergeflow.training import automatic
from convergeflow.training.automatic import plan_for_text
from convergeflow.training.estimate import RunCost

WORDS = "the a cat dog house river sees finds likes small green old and in on under with bread water".split()  # noqa: SIM905


def prose(seed: int, sentences: int) -> str:
    draw = random.Random(seed)
    return "\n".join(" ".join(draw.choices(WORDS, k=9)).capitalize() + "." for _ in range(sentences))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    for number in range(3):
        (tmp_path / "notes" / f"NOTE{number}").write_text(prose(number, 400))
    return tmp_path / "notes"


def stand_in(seconds: dict[tuple[int, int], float]) -> Any:
    """A machine on which a step of a network of (width, depth) takes so long."""

    def cost(config: Any, model: Any, vocabulary: int) -> RunCost:
        step = seconds[config.model.system.width, config.model.system.depth]
        return RunCost(1000, 1000, config.total_steps, 1, 0, 0, step, step * config.total_steps, "cpu", [])

    return cost


@pytest.mark.parametrize(("unit", "expected"), [(3.0, (64, 3)), (0.2, (128, 4)), (0.02, (128, 6)), (0.002, (192, 6))])
def test_the_size_follows_the_machine_and_the_run_fits_into_its_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, unit: float, expected: tuple[int, int]
) -> None:
    shapes = [(64, 3), (128, 4), (128, 6), (192, 6)]
    work = {shape: automatic._work({"width": shape[0], "depth": shape[1]}, 384) for shape in shapes}
    seconds = {shape: unit * work[shape] / work[128, 4] for shape in shapes}
    monkeypatch.setattr(automatic, "estimate", stand_in(seconds))
    monkeypatch.setattr(automatic, "time", SimpleNamespace(monotonic=lambda: 100.0))
    plan = plan_for_text([str(folder)], minutes=3, began=100.0)
    system = plan.config.model.system
    assert (system.width, system.depth) == expected
    looks = automatic.LOOK_STEPS * (automatic._looks(plan.config.total_steps) + 2)
    spent = automatic.CLOSING + (plan.config.total_steps + looks) * automatic.CAUTION * seconds[expected]
    assert 0.95 * 180 < spent <= 180
    ce, mse = plan.config.stages
    assert ce.steps / mse.steps == pytest.approx(4, rel=0.1)


def test_time_that_was_spent_on_the_text_is_not_spent_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "estimate", stand_in({(128, 4): 0.2, (64, 3): 0.05}))
    monkeypatch.setattr(automatic, "time", SimpleNamespace(monotonic=lambda: 200.0))
    fresh, late = (
        plan_for_text([str(folder)], ["model.width=128"], minutes=3, began=200.0 - before) for before in (0.0, 90.0)
    )
    assert late.config.total_steps < 0.6 * fresh.config.total_steps
    hasty = plan_for_text([str(folder)], minutes=3, began=200.0 - 175)
    assert hasty.config.total_steps == 2  # a step of each stage; the clock will end them
    with pytest.raises(UserError, match="3 minutes are too short"):
        plan_for_text([str(folder)], minutes=3, began=200.0 - 181)


def test_every_choice_is_told_with_a_reason(folder: Path) -> None:
    said: list[Decision] = []
    plan = plan_for_text([str(folder)], steps=40, say=said.append)
    assert said == plan.choices
    named = {choice.what: choice for choice in said}
    assert {"tokenizer", "sequences", "held out", "stage ce", "stage mse", "against repetition"} <= named.keys()
    assert named["tokenizer"].value.startswith("word-byte") and all(choice.why for choice in said)
    assert named["stage ce"].value == "32 steps of 32 sequences"
    assert plan.config.total_steps == 40 and plan.config.corpus.windows == "random"
    assert plan.config.model.system.dropout == 0.1  # a short text, read many times
    assert plan.given["stages", "0", "steps"] == "scaled" and plan.given["corpus", "length"] == "the corpus"
    assert plan.corpus.manifest["source"]["documents"] == 3


def test_what_is_given_is_not_chosen(folder: Path) -> None:
    given = ["corpus.tokenizer=bpe", "corpus.vocabulary=300", "corpus.length=16", "model.dropout=0", "batch=8"]
    plan = plan_for_text([str(folder)], [*given, "evaluate_every=3", "stages.mse.steps=800"], steps=20)
    assert plan.corpus.manifest["tokenizer"]["kind"] == "bpe" and plan.corpus.vocabulary == 300
    assert plan.config.corpus.length == 16 and plan.config.model.system.dropout == 0 and plan.config.batch == 8
    assert plan.config.evaluate_every == 3 and [stage.steps for stage in plan.config.stages] == [10, 10]
    assert "tokenizer" not in {choice.what for choice in plan.choices}
    with pytest.raises(UserError, match=r"corpus\.blocks is for recipes"):
        plan_for_text([str(folder)], ["corpus.blocks=3"], steps=20)


def test_a_prepared_folder_is_taken_as_it_is(folder: Path, tmp_path: Path) -> None:
    corpus = prepare(folder, tmp_path / "corpus", tokenizer="byte", length=24)
    plan = plan_for_text([str(corpus.folder)], steps=4)
    assert plan.corpus.fingerprint == corpus.fingerprint and plan.config.corpus.length == 24
    with pytest.raises(UserError, match="has the length 24, not 32"):
        plan_for_text([str(corpus.folder)], ["corpus.length=32"], steps=4)


# --- what suits a text ---


def test_text_without_spaces_gets_pieces(tmp_path: Path) -> None:
    draw = random.Random(0)
    letters = [chr(0x4E00 + number) for number in range(300)]
    lines = ["".join(draw.choices(letters, k=40)) + "\u3002" for _ in range(500)]
    (tmp_path / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    chosen, choices = settings(look([tmp_path / "a.txt"]), {}, 1e9)
    assert chosen["tokenizer"] == "bpe" and "pieces" in choices[0].why


def test_words_that_come_often_are_the_vocabulary(tmp_path: Path) -> None:
    """Of the 500 words that come 20 times each and the 2,000 that come once or twice, the first are tokens."""
    draw = random.Random(0)
    words = [f"often{number}" for number in range(500)] * 20 + [f"once{number}" for number in range(2000)]
    draw.shuffle(words)
    (tmp_path / "a.txt").write_text(" ".join(words))
    found = look([tmp_path / "a.txt"])
    chosen, _ = settings(found, {}, 1e9)
    # Letters and digits are cut apart: "often", "once", and the numbers from 10 to 499; a digit is a byte anyway.
    assert chosen["tokenizer"] == "word-byte" and chosen["vocabulary"] - 257 in (492, 493)


def test_the_field_with_most_text_is_the_text(tmp_path: Path) -> None:
    rows = [{"id": str(number), "title": "note", "body": prose(number, 3)} for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chosen, choices = settings(look([tmp_path / "a.jsonl"]), {}, 1e9)
    assert chosen["text_field"] == "body" and choices[0].what == "text field"
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({**row, "text": "x y z"}) for row in rows))
    assert "text_field" not in settings(look([tmp_path / "b.jsonl"]), {}, 1e9)[0]


def test_of_a_large_text_only_what_can_be_read_is_prepared(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(prose(0, 4000))
    size = (tmp_path / "a.txt").stat().st_size
    found = look([tmp_path / "a.txt"])
    chosen, choices = settings(found, {}, size / 4)
    assert chosen["share"] == pytest.approx(0.25) and "no time to read more" in str(choices)
    assert "share" not in settings(found, {}, size)[0]


@pytest.mark.parametrize(("sentences", "share"), [(60, 0.1), (3000, 0.1), (40_000, 0.04), (200_000, 0.02)])
def test_enough_is_held_out_to_measure_on(tmp_path: Path, sentences: int, share: float) -> None:
    """256 sequences where they are between a fiftieth and a tenth of the text; ten tokens a sentence."""
    (tmp_path / "a.txt").write_text(prose(1, 500) * (sentences // 500) if sentences > 500 else prose(1, sentences))
    chosen, _ = settings(look([tmp_path / "a.txt"]), {}, 1e9)
    assert chosen["heldout_share"] == pytest.approx(share, abs=0.006)
    assert chosen["length"] == (32 if sentences == 60 else 64)


# --- starting from another model ---


def test_fine_tuning_takes_the_checkpoints_size_and_its_tokenizer_where_it_can(folder: Path) -> None:
    start = zoo.locate("sotu-small")
    plan = plan_for_text([str(folder)], steps=10, init_from=start)
    shipped = json.loads((start / "config.json").read_text())
    system = plan.config.model.system
    assert (system.width, system.depth, system.block_length) == (  # type: ignore[attr-defined]
        shipped["width"],
        shipped["depth"],
        shipped["block_length"],
    )
    assert plan.corpus.vocabulary == shipped["vocabulary"] and plan.corpus.length == shipped["length"]
    assert plan.config.stages[0].lr == pytest.approx(1e-3)
    assert "that of sotu-small" in next(choice.why for choice in plan.choices if choice.what == "tokenizer")


def test_a_tokenizer_of_given_words_is_replaced(folder: Path) -> None:
    """The stories' tokenizer has 300 words and no way to write another."""
    plan = plan_for_text([str(folder)], steps=10, init_from=zoo.locate("stories-small"))
    assert plan.corpus.manifest["tokenizer"]["kind"] == "word-byte"
    assert plan.config.model.system.pool_evidence  # type: ignore[attr-defined]
    assert plan.config.stages[0].learn_table


@pytest.mark.parametrize("name", ["stories-ar", "stories-mdlm", "stories-direct"])
def test_every_shipped_kind_can_be_gone_on_with(folder: Path, name: str) -> None:
    plan = plan_for_text([str(folder)], steps=10, init_from=zoo.locate(name))
    assert plan.config.model.method == name.removeprefix("stories-").replace("direct", "convergeflow")
    assert [stage.objective for stage in plan.config.stages][-1] == "mse"
