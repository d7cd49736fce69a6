from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from convergeflow import zoo
from convergeflow.errors import UserError
from convergeflow.training import config as configuration
from convergeflow.training.config import (
    RunConfig,
    StageConfig,
    assembled,
    from_dict,
    origins,
    refitted,
    renewed,
    resolve,
    scaled,
)
from convergeflow.training.recipes import parse_override, read_recipe, recipes


@pytest.mark.parametrize("name", ["test", "stories", "sotu", "sotu-blocks", "owt"])
def test_recipes_round_trip(name: str) -> None:
    assert name in recipes()
    config = resolve(name)
    assert from_dict(config.to_dict()) == config


def test_owt_is_the_paper() -> None:
    config = resolve("owt")
    assert (config.model.system.depth, config.model.system.width, config.model.system.heads) == (12, 768, 12)
    assert (config.corpus.length, config.corpus.vocabulary, config.batch) == (1024, 50257, 480)
    (stage,) = config.stages
    assert (stage.objective, stage.steps, stage.lr, stage.warmup, stage.lr_schedule) == (
        "mse",
        200_000,
        1e-5,
        0,
        "constant",
    )
    assert not stage.learn_table and not stage.learn_schedule and stage.self_condition == 0.25
    assert config.optimizer.name == "adamw" and config.optimizer.betas == (0.9, 0.999)
    assert config.optimizer.clip is None and config.optimizer.weight_decay == 0.0
    assert config.ema.decay == 0.9999 and not config.ema.warmup
    # The paper's best checkpoint is that of step 175,000.
    assert config.keep_every == 25_000 and 175_000 % config.keep_every == 0
    assert config.compile == "auto"


def test_owt_large_learns_its_table_first() -> None:
    config = resolve("owt-large")
    assert (config.model.system.depth, config.model.system.width, config.parallel) == (24, 1024, "fsdp")
    first, second = config.stages
    assert first.objective == "ce" and first.learn_table and first.learn_schedule and second.objective == "mse"


def test_a_checkpoint_that_is_never_written_cannot_be_kept() -> None:
    with pytest.raises(UserError, match="keep_every 25000 is not a multiple of checkpoint_every 300"):
        resolve("owt", ["checkpoint_every=300"])
    assert resolve("owt", ["compile=true"]).compile is True
    with pytest.raises(UserError, match="compile"):
        resolve("owt", ["compile=perhaps"])


@pytest.mark.parametrize("name", ["test", "stories", "sotu", "sotu-blocks"])
def test_two_stage_recipe(name: str) -> None:
    stages = resolve(name).stages
    # Cross-entropy that ends with table and schedule learned, then MSE with both frozen; sotu-blocks has that twice.
    rounds = [index for index, stage in enumerate(stages) if stage.objective == "mse"]
    assert len(rounds) == (2 if name == "sotu-blocks" else 1) and rounds[-1] == len(stages) - 1
    for index in rounds:
        first, second = stages[index - 1], stages[index]
        assert first.objective == "ce" and first.learn_table and first.learn_schedule
        assert not second.learn_table and not second.learn_schedule


def test_start_of_the_schedule_follows_the_width() -> None:
    def start(name: str, *overrides: str) -> float:
        return resolve(name, overrides).model.system.schedule["loc"]  # type: ignore[attr-defined]

    assert start("owt") == pytest.approx(4.723)
    assert start("stories") == pytest.approx(4.723 - math.log(6))
    assert start("stories", "model.schedule.loc=3") == 3.0


def test_overrides_reach_every_level() -> None:
    config = resolve("test", ["batch=8", "stages.0.steps=7", "stages.mse.lr=1e-4", "model.schedule.kind=linear"])
    assert config.batch == 8 and config.stages[0].steps == 7 and config.stages[1].lr == 1e-4
    assert config.model.system.schedule == {"kind": "linear"}  # type: ignore[attr-defined]
    assert resolve("test", ["optimizer.clip=null"]).optimizer.clip is None


def test_size_fills_what_is_not_given() -> None:
    config = resolve("test", ["model.size=small", "model.depth=6"])
    assert (config.model.system.width, config.model.system.depth, config.model.system.heads) == (128, 6, 4)


def test_configuration_is_frozen() -> None:
    with pytest.raises(ValueError):
        resolve("test").batch = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["bach=8"], ["'bach'", "did you mean 'batch'"]),
        (["stages.0.stepz=8"], ["stages.0.stepz", "'stages.0.steps'"]),
        (["model.schedule.scael=1"], ["model.schedule.scael", "'model.schedule.scale'"]),
        (["stages.0.steps=-5"], ["stages.0.steps", "greater than 0", "-5"]),
        (["stages.2.steps=5"], ["stages.2", "0 (ce)", "1 (mse)"]),
        (["stages.0.objective=cd"], ["stages.0.objective", "'ce'", "'mse'"]),
        (["batch=0"], ["batch", "greater than 0"]),
        (["batch=many"], ["batch", "integer", "many"]),
        (["batch=15", "accumulate=2"], ["batch 15", "accumulate 2"]),
        (["model.heads=5"], ["width 32", "2 x 5"]),
        (["model.size=smal"], ["smal", "did you mean 'small'"]),
        (["model.dropout=1"], ["model", "dropout", "less than 1"]),
        (["model.neighbors=2"], ["model.neighbors", "'model.neighbours'"]),
        (["model.neighbours=2.5"], ["model.neighbours", "2.5"]),
        (["model.method=mdln"], ["mdln", "'mdlm'"]),
        (["model.size=null", "model.depth=2", "model.heads=2"], ["width is missing"]),
        (["optimizer.betas=[0.9,1.5]"], ["optimizer.betas.1", "1.5"]),
        (["stages.0.warmup=100"], ["warmup 100", "30 steps"]),
        (["stages.0.lr=nan"], ["stages.0.lr", "nan"]),
        (["stages.1.name=ce"], ["stage names"]),
        (["stages=[]"], ["stages", "at least 1"]),
        (["batch.size=4"], ["batch is a single value"]),
        (["batch"], ["'batch' is not key=value"]),
        (["corpus=[1"], ["corpus"]),
    ],
)
def test_mistakes_are_refused_in_one_line(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        resolve("test", overrides)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'stories'"):
        resolve("storys")
    with pytest.raises(UserError, match="no configuration file"):
        resolve("missing.yaml")


def test_own_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "corpus: {name: stories}\nmodel: {size: test}\nbatch: 4\n"
        "stages: [{name: a, objective: ce, steps: 1, lr: 1e-3}]\n"
    )
    assert resolve(str(path)).stages[0].lr == 1e-3
    path.write_text("batch: [")
    with pytest.raises(UserError, match="not valid YAML"):
        resolve(str(path))
    path.write_text("model: {size: test}\n")
    with pytest.raises(UserError, match="corpus is missing"):
        resolve(str(path))


def origins_of(*overrides: str) -> list[tuple[str, object, str]]:
    values, given = assembled(read_recipe("test"), overrides, "recipe test")
    return origins(from_dict(values), given)


def test_origins() -> None:
    table = {key: (value, origin) for key, value, origin in origins_of("stages.mse.lr=0.5", "model.depth=3")}
    assert table["batch"] == (16, "recipe test")
    assert table["stages.1.lr"] == (0.5, "command line")
    assert table["stages.0.lr"] == (3e-3, "recipe test")
    assert table["model.depth"] == (3, "command line")
    assert table["model.width"] == (32, "size test")
    assert table["accumulate"] == (1, "default")
    assert set(table) == {key for key, _, _ in origins_of()}


def test_rates() -> None:
    stage = StageConfig(name="a", objective="ce", steps=12, lr=1.0, warmup=2, lr_schedule="cosine", lr_floor=0.1)
    assert stage.rate(0) == 0.5 and stage.rate(1) == 1.0 and stage.rate(2) == pytest.approx(1.0)
    assert stage.rate(7) == pytest.approx(0.1 + 0.9 * 0.5)
    linear = stage.model_copy(update={"lr_schedule": "linear", "lr_floor": 0.0})
    assert linear.rate(7) == pytest.approx(0.5)
    assert stage.model_copy(update={"lr_schedule": "constant"}).rate(11) == 1.0


def test_stage_at() -> None:
    config = resolve("test")
    assert config.total_steps == 50
    assert config.stage_at(0) == (0, 0) and config.stage_at(29) == (0, 29) and config.stage_at(30) == (1, 0)
    with pytest.raises(IndexError):
        config.stage_at(50)


def test_parse_override_reads_yaml() -> None:
    assert parse_override("a.b=[1, 2]") == (("a", "b"), [1, 2])
    assert parse_override("a=x=y") == (("a",), "x=y")


def test_every_field_is_reachable_by_its_origin_key() -> None:
    for key, value, _ in origins_of():
        if value is not None and not isinstance(value, list | dict):
            assert isinstance(resolve("test", [f"{key}={value}"]), RunConfig), key
    assert configuration.SIZES["base"] == {"width": 768, "depth": 12, "heads": 12}


def test_one_recipe_serves_all_methods_and_files_of_older_runs_load() -> None:
    """What only ConvergeFlow's network has is left out elsewhere; a method's own fields once stood under `options`."""
    elf = resolve("stories", ["model.method=elf", "model.options.latent=32"])
    assert elf.model.system.latent == 32 and elf.model.system.gate_init == 1.0  # type: ignore[attr-defined]
    assert "neighbours" not in elf.to_dict()["model"] and elf.to_dict()["model"]["latent"] == 32
    old = json.loads((zoo.locate("stories-small") / "run.json").read_text())
    assert old["model"]["options"] == {} and old["model"]["schedule"]["loc"] is None
    assert renewed(old)["model"]["schedule"]["loc"] == pytest.approx(4.723 - math.log(6))
    assert renewed({**old, "model": {**old["model"], "method": "mdlm"}}) == renewed(
        {**old, "model": {**renewed(old)["model"], "method": "mdlm"}}
    )
    again = from_dict(old)
    assert again.model.system.neighbours == 3 and from_dict(again.to_dict()) == again  # type: ignore[attr-defined]


# --- so many steps ---


@pytest.mark.parametrize("name", ["test", "stories", "sotu", "basic", "own-text", "owt"])
@pytest.mark.parametrize("factor", [0.01, 0.1, 0.37, 3.0])
def test_stages_and_warm_up_are_scaled_in_proportion(name: str, factor: float) -> None:
    config = resolve(name)
    steps = max(len(config.stages), round(factor * config.total_steps))
    found = scaled(config, steps)
    assert found.total_steps == steps
    for before, after in zip(config.stages, found.stages, strict=True):
        assert abs(after.steps - before.steps * steps / config.total_steps) < 1.5 or after.steps == 1
        assert abs(after.warmup - before.warmup * steps / config.total_steps) <= 0.5 or after.warmup == after.steps
        assert after.model_dump(exclude={"steps", "warmup"}) == before.model_dump(exclude={"steps", "warmup"})
    with pytest.raises(UserError, match="need at least"):
        scaled(config, len(config.stages) - 1)


def test_what_is_left_is_refitted_and_what_is_done_stays() -> None:
    """`test` has 30 and 20 steps, 5 of them to warm up: after 10 steps 20 and 20 are left."""
    config = resolve("test")
    for left, expected in ((40, [30, 20]), (20, [20, 10]), (80, [50, 40]), (1, [11, 1])):
        found = refitted(config, 10, left)
        assert [stage.steps for stage in found.stages] == expected and found.stages[0].warmup == 5
    assert [stage.steps for stage in refitted(config, 35, 5).stages] == [30, 10]  # the first stage is behind
    assert refitted(config, 2, 24).stages[0].warmup == 2  # half of 5: it is still warming up


def test_the_same_number_of_steps_changes_nothing() -> None:
    assert scaled(resolve("stories"), resolve("stories").total_steps) == resolve("stories")


# --- a corpus that a recipe is given ---


def test_a_recipe_yields_to_the_corpus_it_is_given(tmp_path: Path) -> None:
    """`sotu` says bpe of 1024 in sequences of 64; the corpus is bytes in sequences of 24."""
    from convergeflow.data.prepare import prepare

    (tmp_path / "a.txt").write_text("some words of mine\n" * 80)
    corpus = prepare(tmp_path / "a.txt", tmp_path / "corpus", tokenizer="byte", length=24)
    for named in (f"corpus.name={corpus.folder}", f"corpus.paths=[{corpus.folder}]"):
        config = resolve("sotu", [named])
        assert (config.corpus.vocabulary, config.corpus.length, config.corpus.tokenizer) == (257, 24, None)
        assert config.model == resolve("sotu").model
    values, given = assembled(read_recipe("sotu"), [f"corpus.name={corpus.folder}"], "recipe sotu")
    table = {key: origin for key, _, origin in origins(from_dict(values), given)}
    assert table["corpus.length"] == "the corpus" and table["corpus.name"] == "command line"
    # What is said on the command line is not taken back; opening the corpus refuses it.
    assert resolve("sotu", [f"corpus.name={corpus.folder}", "corpus.length=32"]).corpus.length == 32


def test_a_corpus_by_name_takes_the_place_of_files_and_of_a_tokenizer_it_cannot_have(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    stage = "{name: ce, objective: ce, steps: 2, lr: 1.0e-3}"
    path.write_text(f"corpus: {{paths: [a.txt], length: 16}}\nmodel: {{size: test}}\nbatch: 4\nstages: [{stage}]\n")
    assert resolve(str(path), ["corpus.name=stories"]).corpus.paths == ()
    assert resolve("sotu", ["corpus.name=stories"]).corpus.tokenizer is None
    assert resolve("sotu", ["corpus.paths=[a.txt]"]).corpus.tokenizer == "bpe"
