"""Files and numbers of strangers: what is too large is refused with an estimate, what is odd with one line.

Findings 14, 15 and 21. Every case ends before any work, so none may take long or much memory.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import RECIPE, Outcome

Command = Callable[..., Outcome]
SHIPPED = Path(__file__).resolve().parents[2] / "src/convergeflow/checkpoints/stories-small"
GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """Whoever takes more than 4 GB fails."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


# --- 14 and 15: bounds ---

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("generate --infill once___ --gap 1000000000", "more than the 4096"),
        ("generate --num 1000000000", "of memory"),
        ("generate --num 1000000000000 --out {out}/s.jsonl", "on the disk"),
        ("generate --nfe 1000000000", "--nfe must be at least 1 and at most 100,000"),
        ("generate --length 1000000", "may make 4,096 at most"),
        ("generate --batch 1000000000 --num 100000000", "of memory"),
        ("evaluate --num 1000000000", "of memory"),
        ("evaluate --bound 1000000000", "at most 10,000"),
        ("compare --bound 1000000000", "at most 10,000"),
        ("sweep --num 1000000000 --out {out}/sweep", "memory"),
        ("train {recipe} batch=1000000000 --out {out}/run", "GB, and this machine has"),
        ("train {recipe} model.depth=10000000 --out {out}/run", "depth must be at most 1,024"),
        ("train {recipe} model.width=60000 model.depth=1000 --out {out}/run", "GB, and this machine has"),
        ("train {out}/bomb.yaml --out {out}/run", "references"),
        ("train {out}/deep.yaml --out {out}/run", "nested too deeply"),
        ("train {out}/large.yaml --out {out}/run", "bytes"),
        ("train {recipe} model.schedule=[[[[[{deep}]]]]] --out {out}/run", ""),
        ("prepare stories --blocks 1000000000000 --out {out}/c", "on the disk"),
        ("prepare {out}/pipe.txt --out {out}/c", "a pipe or a device"),
        ("prepare {out}/text.txt --vocabulary 99999999999 --out {out}/c", "at most"),
        ("prepare {out}/text.txt --tokenizer word --vocabulary 99999999999 --out {out}/c", "at most"),
        ("prepare {out}/deep.jsonl --out {out}/c", "nested too deeply"),
    ],
)
def test_14_what_cannot_be_held_is_refused_with_the_estimate(
    tmp_path: Path, words: str, says: str, command: Command
) -> None:
    (tmp_path / "bomb.yaml").write_text(BOMB)
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 5000 + "]" * 5000)
    (tmp_path / "large.yaml").write_text("a: 1\n" * 300_000)
    (tmp_path / "text.txt").write_text("Once there was a text.\n" * 40)
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n")
    os.mkfifo(tmp_path / "pipe.txt")
    there = {"out": tmp_path, "deep": "[" * 60 + "1" + "]" * 60, "recipe": " ".join(RECIPE)}
    refused = command(*words.format(**there).split())
    assert refused.code == 2 and says in refused.line, refused.err
    assert not (tmp_path / "run").exists() and not (tmp_path / "c").exists() and not (tmp_path / "s.jsonl").exists()


# --- 21: every file from outside is parsed by type ---

ODD: tuple[Any, ...] = (None, True, -1, 0, 1e400, "x", [], [[]], {}, {"a": 1}, "9" * 5000, 10**30)


def broken(folder: Path, name: str, key: str | None, value: Any) -> None:
    """The JSON file with one value replaced, or as a whole."""
    path = folder / name
    if key is None:
        path.write_text(json.dumps(value))
        return
    values = json.loads(path.read_text())
    values[key] = value
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("config.json", [None, "model_type", "vocabulary", "depth", "width", "heads", "schedule", "length", "preset"]),
        ("tokenizer_config.json", [None, "eos_token", "convergeflow"]),
        ("tokenizer.json", [None, "model", "added_tokens", "pre_tokenizer"]),
        ("manifest.json", [None, "files", "sha256"]),
    ],
)
def test_21_no_value_in_a_checkpoint_is_an_internal_error(
    tmp_path: Path, name: str, keys: list[str | None], command: Command
) -> None:
    for key in keys:
        for number, value in enumerate(ODD):
            folder = Path(shutil.copytree(SHIPPED, tmp_path / f"{key}{number}"))
            if name != "manifest.json":
                (folder / "manifest.json").unlink()
            broken(folder, name, key, value)
            said = command("inspect", folder)
            assert said.code in (0, 1, 2) and said.line is not None, (key, value)
            shutil.rmtree(folder)


def test_21_no_value_in_a_corpus_is_an_internal_error(tmp_path: Path, command: Command) -> None:
    words = ("prepare", "stories", "--blocks", 8, "--heldout-blocks", 4, "--length", 32, "--out")
    assert command(*words, tmp_path / "c").code == 0
    for key in (None, "format", "name", "length", "dtype", "tokenizer", "splits", "split", "sha256", "source"):
        for value in ODD:
            folder = Path(shutil.copytree(tmp_path / "c", tmp_path / "d"))
            broken(folder, "manifest.json", key, value)
            said = command("prepare", folder, "--length", 32)
            assert said.code in (0, 1, 2) and said.line is not None, (key, value)
            shutil.rmtree(folder)


@pytest.mark.parametrize(
    "text", ["", "null", "[", '{"key": 1}', '{"key": "x", "done": 3}', '{"key":"x","done":{}}', "\x00"]
)
def test_21_a_garbage_note_of_prepare_is_one_line(tmp_path: Path, text: str, command: Command) -> None:
    (tmp_path / "c.partial").mkdir()
    (tmp_path / "c.partial/progress.json").write_text(text)
    refused = command("prepare", "stories", "--blocks", 4, "--heldout-blocks", 2, "--out", tmp_path / "c")
    assert refused.code == 2 and "c.partial" in refused.line


def test_21_no_record_is_an_internal_error(tmp_path: Path, command: Command) -> None:
    whole = {"gen_ppl": 1.0, "gen_ppl_se": 0.1, "entropy": 1.0, "n": 2, "metrics": {"a": {"value": 1, "se": 0}}}
    whole |= {"likelihood": None, "model": {}, "corpus": {}, "real": {}, "seeds": [1], "sampling": {}, "versions": {}}
    frontier = {"kind": "frontier", "title": "t", "curves": [{"label": "a", "points": []}]}
    for start in (whole, frontier, {"records": [whole]}):
        for key in (None, *start):
            for value in (*ODD, [1], ["a"], {"a": {"b": 1}}):
                path = tmp_path / "r.json"
                path.write_text(json.dumps(value if key is None else {**start, key: value}))
                said = command("inspect", path)
                assert said.code in (0, 2) and said.line is not None, (key, value)


@pytest.mark.parametrize(
    "line", [*map(json.dumps, ODD), '{"ids": [1]', "[" * 50_000, '{"ids": [NaN]}', '{"ids": [[1]]}', "\x00"]
)
@pytest.mark.parametrize("words", [["evaluate", "--samples"], ["blind", "--num", "1"]])
def test_21_no_sample_line_is_an_internal_error(tmp_path: Path, line: str, words: list[str], command: Command) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(line + "\n")
    refused = command(*words, path, *([path] if words[0] == "blind" else []))
    assert refused.code == 2 and refused.line


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000, 1000000, 1000), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-1, 8, 64), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': " + "(" * 400 + ")" * 400 + ", }",
        "{'descr': '<f8'",
        "__import__('os').system('true')",
    ],
)
def test_21_a_giant_array_is_one_line(tiny: Path, tmp_path: Path, header: str, command: Command) -> None:
    text = header.encode().ljust(117) + b"\n"
    (tmp_path / "n.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64))
    for option in ("--noise", "--grid"):
        refused = command("generate", "--model", tiny, "--nfe", 4, option, tmp_path / "n.npy")
        assert refused.code == 2 and "n.npy" in refused.line


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "cond_dim", "n_blocks", "n_heads", "model_length", "dropout"]
)
def test_21_no_foreign_config_is_an_internal_error(tmp_path: Path, key: str, command: Command) -> None:
    for number, value in enumerate(ODD):
        source = Path(shutil.copytree(GOLDEN / "langflow_tiny", tmp_path / f"s{number}"))
        broken(source, "config.json", key, value)
        said = command("import", "langflow", source, "--out", tmp_path / f"o{number}", "--tokenizer", "none")
        assert said.code in (0, 1, 2) and said.line is not None, value


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK"])
@pytest.mark.parametrize("value", ["abc", "-1", "", "1.5", "9" * 50])
def test_21_odd_environment_is_one_line(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, command: Command
) -> None:
    monkeypatch.setenv(name, value)
    refused = command("generate", "--model", tiny, "--num", 1, "--nfe", 4)
    assert refused.code == 2 and name in refused.line


def test_21_a_torn_line_of_clocks_is_passed_over(tmp_path: Path) -> None:
    from convergeflow.studies.study import training_seconds

    (tmp_path / "timing.jsonl").write_text('{"step": 1, "seconds": 2}\n{"step": 2, "sec{"step": 3, "seconds": 2}\n')
    assert training_seconds(tmp_path) == 2.0


def test_21_damaged_arrays_of_a_store_are_made_again(tmp_path: Path) -> None:
    from convergeflow.results.store import Store

    store = Store(tmp_path)
    made = lambda: ({"a": np.arange(3)}, {"n": 3})  # noqa: E731
    store.arrays({"k": 1}, made)
    path = next((tmp_path / "samples").glob("*.npz"))
    path.write_bytes(path.read_bytes()[:-20])
    assert store.arrays({"k": 1}, made)[0]["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("text", ["{", "[]", "\x00", '{"step": 1}\n[[[[', "null\n"])
def test_21_a_damaged_journal_is_one_line(trained: Path, tmp_path: Path, text: str, command: Command) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / "journal.jsonl").write_text(text + "\n")
    refused = command("inspect", run, "--plot", tmp_path / "p.png")
    assert refused.code == 2 and "journal" in refused.line
