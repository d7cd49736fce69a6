"""Sample files and what is shown of them: findings 2, 3, 4, 5, 13, 19, 20 and 22."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_run import Outcome

from convergeflow import files
from convergeflow.cli import generate as room
from convergeflow.results import sample_file
from convergeflow.systems.protocol import Samples

Command = Callable[..., Outcome]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def together(monkeypatch: pytest.MonkeyPatch, command: Command, words: list[object], world: int) -> list[Outcome]:
    """The processes of one command, one after another: the last one first, so that the first can join the parts."""
    said = []
    for rank in reversed(range(world)):
        monkeypatch.setattr(room, "_processes", lambda rank=rank: (rank, world, lambda: None))
        said.append(command(*words))
    monkeypatch.undo()
    return said


# --- 2: other settings are not the same samples ---


@pytest.mark.parametrize(
    "change", [["--nfe", "8"], ["--scg", "2"], ["--solver", "multistep"], ["--temperature", "0.5"], ["--length", "12"]]
)
def test_2_a_full_file_of_other_settings_is_refused(
    tiny: Path, tmp_path: Path, change: list[str], command: Command
) -> None:
    words = ("generate", "--model", tiny, "--num", 2, "--nfe", 4, "--out", tmp_path / "s.jsonl")
    assert command(*words).code == 0
    before = (tmp_path / "s.jsonl").read_bytes()
    refused = command(*words, *change)
    assert refused.code == 2 and "other settings" in refused.line
    assert (tmp_path / "s.jsonl").read_bytes() == before
    assert command(*words).code == 0


def test_2_controls_of_rivals_are_compared(tmp_path: Path, command: Command) -> None:
    from convergeflow.systems import METHODS

    METHODS["mdlm"](METHODS["mdlm"].config_class.of_size("test", vocabulary=31, length=8)).save_pretrained(
        tmp_path / "m"
    )
    words = ("generate", "--model", tmp_path / "m", "--num", 2, "--nfe", 4, "--out", tmp_path / "s.jsonl")
    assert command(*words, "--temperature", "0.5").code == 0
    assert command(*words, "--temperature", "0.5").code == 0
    assert command(*words).code == 2


def test_2_a_prompt_makes_other_samples(tmp_path: Path, command: Command) -> None:
    words = ("generate", "--num", 2, "--nfe", 4, "--out", tmp_path / "s.jsonl")
    assert command(*words).code == 0
    assert command(*words, "--prompt", "once").code == 2
    assert command(*words, "--infill", "once ___").code == 2


def test_2_kept_samples_of_evaluate_are_compared_too(tmp_path: Path, command: Command) -> None:
    words = ("evaluate", "stories-small", "--num", 2, "--keep", tmp_path / "s.jsonl")
    assert command(*words, "--nfe", 4).code == 0
    refused = command(*words, "--nfe", 8)
    assert refused.code == 2 and "other settings" in refused.line


# --- 3: what is no number never becomes a word ---


@pytest.fixture
def poisoned(tiny: Path, tmp_path: Path) -> Callable[[str, float], Path]:
    def make(part: str, value: float, whole: bool = False) -> Path:
        folder = Path(shutil.copytree(tiny, tmp_path / "poisoned"))
        (folder / "manifest.json").unlink(missing_ok=True)
        weights = load_file(folder / "model.safetensors")
        name = next(name for name in weights if part in name)
        weights[name].view(-1)[: None if whole else 1] = value
        save_file(weights, folder / "model.safetensors")
        return folder

    return make


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["embedding", "mlp_up.weight", "head.bias"])
def test_3_weights_that_are_not_finite_are_refused(
    poisoned: Callable[[str, float], Path], part: str, value: float, command: Command
) -> None:
    refused = command("generate", "--model", poisoned(part, value), "--num", 2, "--nfe", 4)
    assert refused.code == 2 and "not finite" in refused.line and part.split(".")[0] in refused.line
    assert refused.out == ""


def test_3_a_state_that_overflows_is_named_with_its_step(poisoned: Callable[..., Path], command: Command) -> None:
    refused = command(
        "generate", "--model", poisoned("mlp_down.weight", 3e38, True), "--num", 2, "--nfe", 4, "--seed", 7
    )
    assert refused.code == 1 and "seed 7" in refused.line and "at step" in refused.line
    assert refused.out == ""


def test_3_the_look_costs_one_read_per_batch(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from convergeflow import zoo
    from convergeflow.systems import finite

    looks: list[int] = []
    rows = finite._finite_rows
    monkeypatch.setattr(finite, "_finite_rows", lambda value: looks.append(len(value)) or rows(value))
    zoo.load_model(tiny).generate(6, length=8, nfe=16, batch=3)
    assert looks == [3, 3, 3, 3]  # two batches, the state and the prediction of each


@pytest.mark.parametrize(
    "option", [["--scg", "1e308"], ["--ug", "1e308"], ["--temperature", "1e-300"], ["--base-temperature", "1e300"]]
)
def test_3_controls_beyond_all_sense_are_refused(tiny: Path, option: list[str], command: Command) -> None:
    refused = command("generate", "--model", tiny, "--num", 1, "--nfe", 4, *option)
    assert refused.code == 2 and option[0] in refused.line


@pytest.mark.parametrize("value", [1e300, -1e4])
def test_3_noise_beyond_all_sense_is_refused(tiny: Path, tmp_path: Path, value: float, command: Command) -> None:
    np.save(tmp_path / "noise.npy", np.full((1, 8, 64), value))
    refused = command("generate", "--model", tiny, "--nfe", 4, "--noise", tmp_path / "noise.npy")
    assert refused.code == 2 and "beyond" in refused.line


@pytest.mark.parametrize("method", ["ar", "mdlm", "plaid", "flm"])
def test_3_rivals_refuse_the_same_temperatures(method: str) -> None:
    from convergeflow.errors import UserError
    from convergeflow.systems import METHODS

    model = METHODS[method](METHODS[method].config_class.of_size("test", vocabulary=31, length=8))
    with pytest.raises(UserError, match="temperature"):
        model.sample(1, 8, seeds=[0], nfe=4, temperature=1e-300)


# --- 4: a foreign file is foreign for any number of processes ---


@pytest.mark.parametrize("world", [1, 2])
def test_4_a_foreign_file_is_not_overwritten(
    tiny: Path, tmp_path: Path, world: int, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    (tmp_path / "notes.txt").write_text("my notes\n")
    words = ["generate", "--model", tiny, "--num", 4, "--nfe", 4, "--batch", 2, "--out", tmp_path / "notes.txt"]
    assert {said.code for said in together(monkeypatch, command, words, world)} == {2}
    assert (tmp_path / "notes.txt").read_text() == "my notes\n"
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


# --- 5: one writer, and every seed once ---


def test_5_a_file_that_is_being_written_is_refused(tiny: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "two.jsonl"
    with files.only_writer(out, "it"):
        refused = command("generate", "--model", tiny, "--num", 2, "--nfe", 4, "--out", out)
    assert refused.code == 2 and "another process" in refused.line and not out.exists()
    assert [file.name for file in tmp_path.iterdir()] == []  # the lock leaves nothing behind


def test_5_a_lock_holds_against_another_process(tmp_path: Path) -> None:
    out = tmp_path / "two.jsonl"
    with files.only_writer(out, "it"):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with files.only_writer(out, "it"):
                    pass
            except Exception as refusal:
                code = 0 if "another process" in str(refusal) else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_5_repeated_seeds_are_refused(tiny: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "two.jsonl"
    words = ("generate", "--model", tiny, "--num", 2, "--nfe", 4, "--out", out)
    assert command(*words).code == 0
    out.write_bytes(out.read_bytes() * 2)
    refused = command("evaluate", "--samples", out)
    assert refused.code == 2 and "line 3: seed 0 is in line 1 too" in refused.line
    assert command(*words).code == 2


# --- 13: any number of processes goes on with what another number left ---


def make(seeds: Any) -> Samples:
    ids = torch.tensor([[seed, seed * 2, len(seeds)] for seed in seeds])
    return Samples(ids, list(seeds), 4, {"nfe": 4}, [f"text {seed}" for seed in seeds])


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 1), (1, 4)])
def test_13_another_number_of_processes_goes_on(tmp_path: Path, before: int, after: int) -> None:
    seeds, counted = range(20), []

    def counting(group: Any) -> Samples:
        counted.extend(group)
        return make(group)

    sample_file.collect(tmp_path / "whole", seeds, 4, make, "m")
    path = tmp_path / "s.jsonl"
    # The first command is killed when its first process has made all its batches and the others none.
    sample_file.collect(path, seeds[:8] if before == 1 else seeds, 4, counting, "m", rank=0, world=before)
    for rank in reversed(range(after)):
        sample_file.collect(path, seeds, 4, counting, "m", rank=rank, world=after)
    if after > 1:
        sample_file.merge(path, seeds)
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()
    assert sorted(counted) == list(seeds), "a sample was made twice"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["s.jsonl", "whole"]


# --- 19: what was asked for is written, or refused ---


def test_19_logits_go_to_the_name_that_was_given(tiny: Path, tmp_path: Path, command: Command) -> None:
    words = ("generate", "--model", tiny, "--num", 1, "--length", 4, "--nfe", 4)
    assert command(*words, "--logits", tmp_path / "plain").code == 0
    assert [file.name for file in tmp_path.iterdir()] == ["plain"]
    assert np.load(tmp_path / "plain").shape[:2] == (1, 4)
    (tmp_path / "folder").mkdir()
    assert command(*words, "--logits", tmp_path / "folder").code == 2
    assert not (tmp_path / "folder.npy").exists()


def test_19_a_plot_goes_to_the_name_that_was_given(trained: Path, tmp_path: Path, command: Command) -> None:
    assert command("inspect", trained, "--plot", tmp_path / "X").code == 0
    assert [file.name for file in tmp_path.iterdir()] == ["X"]
    assert (tmp_path / "X").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--out", "--logits"])
def test_19_devices_and_links_are_not_written(tiny: Path, tmp_path: Path, option: str, command: Command) -> None:
    (tmp_path / "precious").write_text('{"seed"')
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "link", tmp_path / "pipe"):  # never a real device, which a mistake would replace
        assert command("generate", "--model", tiny, "--num", 1, "--nfe", 4, option, place).code == 2
    assert (tmp_path / "precious").read_text() == '{"seed"'
    assert (tmp_path / "link").is_symlink()


# --- 20: strangers' words do not steer a terminal or a page ---

EVIL = "<script>alert(1)</script> \x1b]0;owned\x07 [x](javascript:1) \x9b31m"


def test_20_pages_show_what_strangers_wrote(tmp_path: Path, command: Command) -> None:
    for name in ("a", "b"):
        line = {"seed": 1, "ids": [1], "text": f"{name} {EVIL}\rback", "nfe": 4, "model": EVIL, "settings": {}}
        (tmp_path / name).write_text(json.dumps(line) + "\n")
    words = [f"{EVIL}={tmp_path / 'a'}", f"b={tmp_path / 'b'}"]
    assert command("blind", *words, "--num", 1, "--title", EVIL, "--out", tmp_path / "out").code == 0
    for page in ("blind.md", "key.md"):
        text = (tmp_path / "out" / page).read_text()
        outside = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
        assert "<script" not in outside and "[x](" not in outside
        assert not any((ord(letter) < 32 and letter != "\n") or 127 <= ord(letter) < 160 for letter in text)


def test_20_records_and_messages_do_not_steer_a_terminal(tmp_path: Path, command: Command) -> None:
    record = {"gen_ppl": 1.0, "gen_ppl_se": 0.1, "entropy": 1.0, "n": 2, "command": EVIL, "model": {"name": EVIL}}
    (tmp_path / "r.json").write_text(json.dumps(record))
    shown = command("inspect", tmp_path / "r.json")
    assert shown.code == 0 and "\x1b" not in shown.out and "\\x1b]0;owned" in shown.out
    as_json = command("inspect", tmp_path / "r.json", "--json")
    assert json.loads(as_json.out) == record and "\x9b" not in as_json.out
    refused = command("generate", "--model", "./\x1b]0;owned\x07")
    assert refused.code == 2 and "\x1b" not in refused.err


def test_20_generated_text_does_not_steer_a_terminal(tmp_path: Path, command: Command) -> None:
    folder = Path(shutil.copytree(Path(room.__file__).parents[1] / "checkpoints/stories-small", tmp_path / "m"))
    (folder / "manifest.json").unlink()
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"the"', '"\\u001b[31mthe"'))
    shown = command("generate", "--model", folder, "--num", 4, "--nfe", 8)
    assert shown.code == 0 and "\x1b" not in shown.out and "\\x1b[31mthe" in shown.out


def test_20_a_card_is_a_page_too(tmp_path: Path) -> None:
    from small_run import RECIPE

    from convergeflow.training.card import write_card
    from convergeflow.training.config import resolve

    config = resolve("test", [*RECIPE[1:], f"stages.0.name={json.dumps(EVIL)}"])
    corpus: Any = SimpleNamespace(name=EVIL, fingerprint="f", length=8)
    assert "<script" not in write_card(config, corpus, 1, 1, {EVIL: 1.0})


# --- 22: nothing odd is taken in silence ---


def test_22_complex_noise_is_refused(tiny: Path, tmp_path: Path, command: Command) -> None:
    np.save(tmp_path / "noise.npy", np.ones((1, 8, 64), dtype=complex))
    refused = command("generate", "--model", tiny, "--nfe", 4, "--noise", tmp_path / "noise.npy")
    assert refused.code == 2 and "real numbers" in refused.line


@pytest.mark.parametrize(
    "change", [{"ids": [True, False]}, {"text": 5}, {"ids": [1.0]}, {"nfe": "4"}, {"seed": 1.5}, {"settings": 3}]
)
def test_22_wrong_types_in_samples_are_refused(tmp_path: Path, change: dict[str, Any], command: Command) -> None:
    line = {"seed": 1, "ids": [1, 2], "text": "a b", "nfe": 4, "model": "m", "settings": {}}
    (tmp_path / "s.jsonl").write_text(json.dumps(line | change) + "\n" + json.dumps(line | {"seed": 2}) + "\n")
    refused = command("evaluate", "--samples", tmp_path / "s.jsonl", "--num", 2)
    assert refused.code == 2 and "line 1" in refused.line


@pytest.mark.parametrize("values", ["1,,2", "1,nan", "1,NaN", "1,Infinity", "[1],2", "true,2"])
def test_22_odd_values_of_a_sweep_are_refused(tiny: Path, tmp_path: Path, values: str, command: Command) -> None:
    refused = command("sweep", tiny, "--values", values, "--num", 2, "--out", tmp_path / "out")
    assert refused.code == 2 and not (tmp_path / "out").exists()


def test_22_a_refinement_without_end_is_refused(tiny: Path, command: Command) -> None:
    for words in (["--refine", str(10**20)], ["--refine", "1e20"]):
        assert command("generate", "--model", tiny, "--nfe", 4, *words).code == 2
