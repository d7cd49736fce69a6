"""Python gives what the command line gives: tokenizer, preset, prompt, infill, bound, fine-tuning, frames."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import convergeflow as cf
from convergeflow import zoo
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.systems.convergeflow import ConvergeFlowModel

STORY = "Once there was a little girl named Mia. She had a red ball."


@pytest.fixture(scope="module")
def model() -> Any:
    return cf.load("stories-small", device="cpu")


def command(*words: str) -> dict[str, Any]:
    """What `convergeflow generate` prints for machines."""
    line = [sys.executable, "-m", "convergeflow", "generate", "--device", "cpu", "--json", *words]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("door", [ConvergeFlowModel, cf.LanguageModel])
def test_a_folder_brings_its_tokenizer_and_its_card(door: Any, model: Any) -> None:
    loaded = door.from_pretrained(zoo.locate("stories-small"))
    assert loaded.tokenizer is not None and loaded.tokenizer.sha256 == model.tokenizer.sha256
    assert loaded.card is not None and "stories" in loaded.card
    assert loaded.generate(seed=5, nfe=4).texts == model.generate(seed=5, nfe=4).texts


@pytest.mark.parametrize("name", ["stories-small", "sotu-small"])
def test_without_a_word_about_sampling_both_use_the_models_own_preset(name: str) -> None:
    here = cf.load(name, device="cpu")
    short = {"length": 8, "nfe": 15}
    made = here.generate(2, seed=3, **short)
    there = command("--model", name, "--num", "2", "--seed", "3", "--length", "8", "--nfe", "15")
    assert [line["ids"] for line in there["samples"]] == made.ids.tolist()
    own = here.generate(2, seed=3, preset=here.config.preset, **short)
    assert torch.equal(made.ids, own.ids)
    plain = here.generate(2, seed=3, preset="standard", **short)
    assert plain.settings != made.settings


def test_the_first_text_is_a_good_one_and_standard_is_the_papers_sampler(model: Any) -> None:
    assert model.config.preset == "sharp"
    assert zoo.weights_hash(zoo.locate("stories-small")) == "42c1411eb6f7d4f4", "the weights are those of before"
    explicit = model.generate(2, seed=9, settings=cf.Settings(nfe=6))
    assert torch.equal(model.generate(2, seed=9, preset="standard", nfe=6).ids, explicit.ids)
    sharp = model.generate(2, seed=9, settings=cf.preset("sharp", model, nfe=18))
    assert torch.equal(model.generate(2, seed=9, nfe=18).ids, sharp.ids)
    # What the preset refines, a sampler without refinements does not inherit.
    assert model.generate(self_condition="previous", nfe=2).settings["controls"]["refine"] == 1


def test_options_are_those_of_the_command_and_others_are_refused(model: Any) -> None:
    words = ["--seed", "1", "--num", "1", "--nfe", "8", "--solver", "heun", "--temperature", "0.5", "--refine", "2"]
    made = model.generate(seed=1, nfe=8, solver="heun", temperature=0.5, refine=2)
    assert command(*words)["samples"][0]["ids"] == made.ids[0].tolist()
    with pytest.raises(cf.UserError, match="did you mean 'temperature'"):
        model.generate(temprature=0.5)
    with pytest.raises(cf.UserError, match="`settings` are whole"):
        model.generate(settings=cf.Settings(), nfe=8)
    with pytest.raises(cf.UserError, match="did you mean 'sharp'"):
        model.generate(preset="shrap")
    with pytest.raises(cf.UserError, match="too long"):
        model.generate(length=1_000_000)
    for known in ({}, {"prompt": "Once there"}):
        with pytest.raises(cf.UserError, match="length"):
            model.generate(length=0, **known)
    mdlm = cf.load("stories-mdlm", device="cpu")
    name, value = next(iter(mdlm.controls.items()))
    assert mdlm.generate(nfe=4, length=8, **{name: value}).nfe <= 4
    with pytest.raises(cf.UserError, match="does not know `scg`"):
        mdlm.generate(scg=2.0)


def test_a_direct_predictor_is_read_off_by_its_prediction() -> None:
    direct = cf.load("stories-direct", device="cpu")
    there = command("--model", "stories-direct", "--num", "1", "--length", "8", "--nfe", "4")
    assert direct.generate(nfe=4, length=8).ids[0].tolist() == there["samples"][0]["ids"]


def test_a_prompt_is_where_samples_begin(model: Any) -> None:
    made = model.generate(2, prompt="Once there was a clever girl", nfe=9)
    assert made.texts is not None and all(text.startswith("Once there was a clever girl") for text in made.texts)
    assert made.marked is None
    there = command("--prompt", "Once there was a clever girl", "--num", "2", "--nfe", "9")
    assert [line["text"] for line in there["samples"]] == made.texts


def test_what_fills_the_gaps_is_marked(model: Any) -> None:
    infill = "Once there was a ___ girl named ___. She had a ___ ball."
    made = model.generate(2, infill=infill, gap=1, nfe=18, length=20)
    assert made.texts is not None and made.marked is not None
    for text, marked in zip(made.texts, made.marked, strict=True):
        assert marked.count("[") == 3 and marked.replace("[", "").replace("]", "") == text
        before, _, rest = marked.partition("[")
        assert before == "Once there was a " and "] girl named [" in rest and "]. She had a [" in rest
    there = command("--infill", infill, "--gap", "1", "--num", "2", "--nfe", "18", "--length", "20")
    assert [line["marked"] for line in there["samples"]] == made.marked
    line = [sys.executable, "-m", "convergeflow", "generate", "--infill", infill, "--gap", "1", "--nfe", "9", "-n", "1"]
    shown = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert shown.count("[") == 3, "on the screen too"


def test_marks_of_a_byte_level_tokenizer_cut_no_character() -> None:
    from convergeflow.data.tokenizer import byte_tokenizer
    from convergeflow.systems.prompt import marked

    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("a caf\u00e9 here")
    assert marked(tokenizer, ids, [(1, 7)]) == "a [caf\u00e9] here"
    assert marked(tokenizer, ids, [(1, 6)]).replace("[", "").replace("]", "") == "a caf\u00e9 here"


def test_the_documented_infill_is_grammatical() -> None:
    """What the example of the help makes is a sentence that the program of the corpus could have written."""
    from convergeflow.cli.generate import EXAMPLE
    from convergeflow.data.stories import GIRLS

    made = cf.load("stories-small", device="cpu").generate(8, infill=EXAMPLE, gap=1)
    assert made.marked is not None
    for text in made.marked:
        size, name = (part.split("]")[0] for part in text.split("[")[1:])
        assert size in ("little", "small", "young", "clever", "shy"), text
        assert name.lower() in GIRLS.split(), text


def test_an_unknown_word_names_the_nearest_known_ones(model: Any) -> None:
    with pytest.raises(cf.UserError, match=r"'grl' is not in the vocabulary .* know.* girl"):
        model.generate(prompt="Once there was a grl")
    line = [sys.executable, "-m", "convergeflow", "generate", "--prompt", "a dragon"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert (
        done.returncode == 2 and done.stderr.count("\n") == 1 and "'dragon'" in done.stderr and "nearest" in done.stderr
    )


def test_a_tokenizer_with_a_token_for_unknown_words_does_not_hide_them_in_a_prompt() -> None:
    from convergeflow.data.tokenizer import train_words
    from convergeflow.systems.prompt import known_text

    tokenizer = train_words(["the cat sat on the mat"], 20)
    with pytest.raises(cf.UserError, match=r"'dog' .* nearest"):
        known_text(tokenizer, "the dog", None, 4)


def test_half_precision_is_refused_in_one_line(model: Any) -> None:
    for change in (model.half, model.bfloat16, lambda: model.to(torch.bfloat16), lambda: model.to(dtype=torch.float16)):
        with pytest.raises(cf.UserError, match="stay float32") as refusal:
            change()
        assert "\n" not in str(refusal.value)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for dtype in (torch.bfloat16, "float16"):
        with pytest.raises(cf.UserError, match="stay float32"):
            cf.load("stories-small", dtype=dtype)
    with pytest.raises(cf.UserError, match="unknown dtype"):
        cf.load("stories-small", dtype="int8")
    double = cf.load("stories-small", device="cpu", dtype="float64")
    made = double.generate(nfe=4, length=8)
    assert made.settings["precision"]["kernel"] == "float64"
    assert double.to("cpu").float().generate(nfe=4, length=8).settings["precision"]["kernel"] == "float32"


def test_the_bound_of_texts_is_the_bound_of_their_ids(model: Any) -> None:
    texts = [STORY, "Tom was a busy boy. His kite was blue. Then the wind took his blue kite away."]
    rows = [model.tokenizer.encode(text) for text in texts]
    found = model.bound(texts, repeats=2)
    for number, row in enumerate(rows):
        draws = RowDraws([derive_seed(derive_seed(0, "text", number), "piece", 0)])
        alone = model.bound(torch.tensor([row]), draws=draws, repeats=2)
        assert found.nats[number] == pytest.approx(alone.nats_per_token * len(row), rel=1e-5)
    assert found.tokens == sum(map(len, rows))
    assert found.nats_per_token == pytest.approx(sum(found.nats) / found.tokens)
    assert found.standard_error > 0 and math.isnan(model.bound(STORY, repeats=1).standard_error)
    with pytest.raises(cf.UserError, match="text 1 is empty"):
        model.bound([""])
    with pytest.raises(cf.UserError, match="nearest words"):
        model.bound("a dragon")


def test_the_bound_of_an_exact_system_is_exact_and_long_texts_are_cut() -> None:
    exact = cf.load("stories-ar", device="cpu")
    row = exact.tokenizer.encode(" ".join([STORY] * 6))  # type: ignore[union-attr]
    pieces = [row[first : first + 64] for first in range(0, len(row), 64)]
    assert len(pieces) == 2
    parts = [exact.bound(torch.tensor([piece])).nats[0] for piece in pieces]
    assert exact.bound(" ".join([STORY] * 6)).nats[0] == pytest.approx(sum(parts), rel=1e-5)
    scrambled = "Ball red a had she. Mia named girl little a was there once."
    assert exact.bound(scrambled).nats[0] > exact.bound(STORY).nats[0] + 20


@pytest.mark.slow
def test_fine_tuning_keeps_the_tokenizer_and_the_preset(model: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path / "cache"))
    girls, colours = (
        ["Mia", "Lily", "Anna", "Rosa", "Clara", "Emma"],
        ["red", "blue", "green", "white", "black", "pink"],
    )
    texts = [f"{name} was a bold girl. Her {colour} hat was {colour}." for name in girls for colour in colours] * 3
    tuned = model.finetune(texts, out=tmp_path / "run", steps=30, lr=1e-3, batch=8, device="cpu")
    assert tuned.tokenizer is not None and tuned.tokenizer.sha256 == model.tokenizer.sha256
    assert tuned.config.preset == "sharp" and not tuned.training
    assert cf.load(tmp_path / "run", device="cpu").config == tuned.config
    before, after = (each.bound(texts[0], repeats=16).nats_per_token for each in (model, tuned))
    assert after < before - 0.3, "it has learned what it was shown"
    fresh = cf.load("stories-small", device="cpu")
    assert fresh.bound(STORY, repeats=1).nats == model.bound(STORY, repeats=1).nats, "the model itself stays as it was"
    with pytest.raises(cf.UserError, match="already holds a run"):
        model.finetune(texts, out=tmp_path / "run")
    with pytest.raises(cf.UserError, match="neither a file"):
        model.finetune("nowhere.txt", out=tmp_path / "other")
    with pytest.raises(cf.UserError, match=r"'dragon' .* nearest"):
        model.finetune(["a dragon was here . " * 50] * 20, out=tmp_path / "third")


def test_a_flow_is_a_table_of_frames(model: Any) -> None:
    frames = cf.Frames()
    made = model.generate(2, nfe=8, preset="standard", length=6, observe=frames)
    rows = list(frames.rows(model.tokenizer))
    steps = len(frames.frames)
    assert len(rows) == steps * 2 * 6 and rows[-1]["step"] == steps - 1
    last = [row for row in rows if row["step"] == steps - 1 and row["sample"] == 1]
    assert [row["token"] for row in last] == made.ids[1].tolist()
    assert [row["word"] for row in last] == [model.tokenizer.tokens()[token] for token in made.ids[1].tolist()]
    assert all(0 < row["weight"] <= 1 and row["nearest"] <= row["second"] for row in rows)
    rival = cf.Frames()
    cf.load("stories-mdlm", device="cpu").generate(1, nfe=3, length=4, observe=rival)
    assert next(rival.rows())["weight"] is None


WRONG: dict[str, Any] = {
    "num": 1.5,
    "seed": [1, 2],
    "length": "8",
    "gap": 0.5,
    "batch": 0,
    "prompt": ["Once", "Twice"],
    "settings": "sharp",
    "observe": 5,
    "noise": np.zeros((1, 64, 128)),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_of_another_kind_is_refused_by_name(model: Any, name: str) -> None:
    more = {"infill": "Once ___"} if name == "gap" else {} if name == "settings" else {"settings": cf.Settings(nfe=4)}
    with pytest.raises(cf.UserError, match=f"`{name}` must be") as refused:
        model.generate(**{name: WRONG[name], **more})
    assert "\n" not in str(refused.value)


def test_more_samples_than_fit_anywhere_are_refused_before_they_are_made(model: Any) -> None:
    with pytest.raises(cf.UserError, match="several calls"):
        model.generate(10**9, nfe=4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: cf.Settings(nfe="4"),  # type: ignore[arg-type]
        lambda: cf.Settings(nfe=4.5),  # type: ignore[arg-type]
        lambda: cf.Settings(nfe=0),
        lambda: cf.Settings(temperature="hot"),  # type: ignore[arg-type]
        lambda: cf.Settings(controls={"refine": 2}),  # type: ignore[arg-type]
        lambda: cf.Settings(freeze=True),  # type: ignore[arg-type]
        lambda: cf.Settings(solver=["euler"]),  # type: ignore[arg-type]
        lambda: cf.Settings(grid=("early", 1)),  # type: ignore[arg-type]
        lambda: cf.Controls(refine=1.5),  # type: ignore[arg-type]
        lambda: cf.Controls(scg=None),  # type: ignore[arg-type]
        lambda: cf.Controls(ug=True),
        lambda: cf.Controls(ug_schedule=5),  # type: ignore[arg-type]
        lambda: cf.Freeze(weight="x"),  # type: ignore[arg-type]
        lambda: cf.preset(5),  # type: ignore[arg-type]
        lambda: cf.preset("sharp", "stories-small"),  # type: ignore[arg-type]
        lambda: cf.preset("sharp", nfe="8"),  # type: ignore[arg-type]
        lambda: cf.load(5),  # type: ignore[arg-type]
        lambda: cf.evaluate(["a text"]),  # type: ignore[arg-type]
        lambda: cf.Trace().arrays(),
    ],
)
def test_a_wrong_value_is_refused_at_once(make: Any) -> None:
    with pytest.raises(cf.UserError) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_numbers_of_numpy_are_numbers(model: Any, tmp_path: Path) -> None:
    settings = cf.Settings(
        nfe=np.int64(4), temperature=np.float32(0.5), grid=np.array([0.2, 0.6]), controls=cf.Controls(refine=np.int8(1))
    )
    assert settings == cf.Settings(nfe=4, temperature=0.5, grid=(0.2, 0.6)) and hash(settings)
    made = model.generate(np.int64(1), seed=np.int64(3), length=np.int32(8), batch=np.int64(1), settings=settings)
    assert json.loads(json.dumps([made.seeds, made.settings, made.nfe]))[0] == [3]
    ids = np.array([[3, 4, 5]])
    assert model.bound(ids, repeats=np.int64(2)).nats == model.bound(torch.from_numpy(ids), repeats=2).nats
    options = {
        "batch": np.int64(8),
        "corpus": {"blocks": np.int64(64), "heldout_blocks": 16},
        "model": {"dropout": np.float64(0)},
    }
    stages = {"ce": {"steps": np.int64(6)}, "mse": {"steps": 2}}
    assert cf.train("test", out=tmp_path / "run", stages=stages, **options).config.length


def test_token_ids_that_are_none_are_refused(model: Any) -> None:
    for ids in (torch.zeros(1, 4), torch.tensor([[999]]), torch.tensor([[-1]])):
        with pytest.raises(cf.UserError, match="token ids"):
            model.bound(ids)
    for texts in ([[1, 2]], [5], None):
        with pytest.raises(cf.UserError, match="a bound is of texts"):
            model.bound(texts)


def test_limits_of_freezing_hold_as_an_option(model: Any) -> None:
    lasting = cf.Freeze(weight=0.9, patience=1, change=0.5)
    made = model.generate(preset="standard", nfe=8, freeze=lasting)
    assert made.settings["freeze"] == {"weight": 0.9, "patience": 1, "change": 0.5}


def test_an_empty_text_is_not_the_present_folder(model: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "diary.txt").write_text("Mia was a bold girl. " * 200)
    for texts in ("", [""], [" "], [5], None):
        with pytest.raises(cf.UserError):
            model.finetune(texts, out="tuned", steps=2)
    assert not (tmp_path / "tuned").exists()
