"""A table of tiny published checkpoints: from nothing to the page, in several processes, killed and taken up again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))
import scorer_stand_ins

from convergeflow.cli.main import main
from convergeflow.data.tokenizer import train_words
from convergeflow.errors import UserError
from convergeflow.studies.checkpoints import PublishedResult, ratio_to_claim, read_table, shown
from convergeflow.studies.reproduce.paper import systems

PEERS = Path(__file__).resolve().parents[1] / "golden" / "peers"
QUICK = {"nfe": 5}
CLAIM = {"gen_ppl": 35.9, "entropy": 2}


def system(project: str, source: str, **more: Any) -> dict[str, Any]:
    return {"import": project, "source": str(PEERS / source), "tokenizer": "words", "points": [QUICK], **more}


SYSTEMS = {
    "ar": system(
        "ar", "mdlm/ar_plain.ckpt", points=["published", "nucleus-0.9"], claim={"gen_ppl": 35.9, "entropy": 2}
    ),
    "mdlm": system("mdlm", "mdlm/hf", points=[{"preset": "original", "nfe": 5}, QUICK]),
    "sedd": system("sedd", "sedd/absorb/local", weights="raw"),
    "duo": system("duo", "duo/hf", points=[{"preset": "greedy", "nfe": 5}], claim={"gen_ppl": 77.7}),
    "flm": system("flm", "flm/flm_full.ckpt"),
    "fmlm": system("fmlm", "fmlm/fmlm_distill_plain.ckpt", teacher=str(PEERS / "flm" / "flm_plain.ckpt")),
    "elf": system("elf", "elf/ckpt", tokenizer="more-words", length=16),
    "plaid": system("plaid", "plaid"),
    "langflow": system(
        "langflow", "../langflow_tiny", tokenizer="most-words", points=[{"preset": "langflow", "nfe": 5}]
    ),
    "elsewhere": {"source": None, "import": "flm", "remark": "on a disk far away"},
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with a corpus, tokenizers and a scorer beside it."""
    folder = tmp_path_factory.mktemp("table")
    text = " ".join(f"w{number % 98}" for number in range(4000))
    (folder / "text.txt").write_text(text)
    train_words([text], 100).save(folder / "words")
    train_words([" ".join(f"w{number}" for number in range(105))], 107).save(folder / "more-words")
    train_words([" ".join(f"w{number}" for number in range(209))], 211).save(folder / "most-words")
    scorer_stand_ins.random_gpt2(folder / "scorer")
    made = ["--tokenizer", str(folder / "words"), "--length", "16", "--out", str(folder / "corpus")]
    assert main(["prepare", str(folder / "text.txt"), *made]) == 0
    about = {"title": "Tiny", "corpus": "corpus", "scorer": "scorer", "num": 40, "length": 16}
    written = json.loads(json.dumps({**about, "systems": SYSTEMS}))  # else YAML refers to what stands in two places
    (folder / "tiny.yaml").write_text(yaml.safe_dump(written, sort_keys=False))
    return folder / "tiny.yaml"


def start(table: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "convergeflow", "compare", "--checkpoints", str(table), "--out", str(out), *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.slow
def test_from_nothing_to_the_page_killed_and_restarted(table: Path, tmp_path: Path) -> None:
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    process = start(table, broken, "--processes", "2")
    deadline = time.monotonic() + 300
    while not list((broken / "samples").glob("sedd-*")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = {path: path.read_bytes() for path in (broken / "samples").iterdir()}
    assert before and not (broken / "table.md").exists()
    finished = {path: data for path, data in before.items() if len(data.splitlines()) in (8, 32) and data[-1:] == b"\n"}
    models = {path: path.stat().st_mtime_ns for path in broken.rglob("model.safetensors")}
    for out, more in ((broken, ("--processes", "2")), (whole, ())):
        process = start(table, out, *more)
        _, said = process.communicate(timeout=600)
        assert process.returncode == 0, said
        assert "network calls, about" in said and "together about" in said  # the cost comes first
        assert "elsewhere: left out" in said and "on a disk far away" in said
    # What was there was not made again, and nothing depends on the kill or on the number of processes.
    assert all(path.read_bytes() == data for path, data in finished.items())
    assert all(path.stat().st_mtime_ns == made for path, made in models.items())
    tables = [json.loads((out / "table.json").read_text()) for out in (broken, whole)]
    for row in (row for found in tables for row in found["rows"]):
        row.pop("record")
    assert tables[0]["rows"] == tables[1]["rows"]
    check_page(whole, tables[1])


def check_page(folder: Path, found: dict[str, Any]) -> None:
    rows = found["rows"]
    assert [row["system"] for row in rows] == ["ar", "ar", "mdlm", "mdlm", *list(SYSTEMS)[2:-1]]
    assert [row["nfe"] for row in rows if row["system"] in ("ar", "duo", "elf")] == [15, 15, 5, 5]
    assert all(row["n"] == 40 and row["gen_ppl"] > 1 for row in rows)
    assert rows[0]["measured_over_claimed"] == pytest.approx(rows[0]["gen_ppl"] / 35.9)
    assert rows[1]["claim"] is None is rows[1]["measured_over_claimed"]  # the claim is of the first setting
    assert found["left_out"] == ["elsewhere"]
    text = (folder / "table.md").read_text()
    assert "| 35.9 |" in text and "elf has a vocabulary of its own" in text and "frontier.png" in text
    assert "data:image/png" in (folder / "table.html").read_text()
    assert (folder / "frontier.csv").is_file() and found["frontier"]["claims"]["ar"]["gen_ppl"] == 35.9


def test_a_dry_run_imports_and_estimates_but_draws_nothing(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "--checkpoints", str(table), "--out", str(tmp_path), "--systems", "mdlm,duo", "--dry-run"]
    assert main([*words, "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)["systems"]
    assert [(cost["name"], cost["calls"]) for cost in costs] == [("mdlm", 2 * 40 * 5), ("duo", 40 * 5)]
    assert all(cost["seconds"] > 0 for cost in costs)
    assert not (tmp_path / "samples").exists() and len(list(tmp_path.rglob("model.safetensors"))) == 2


def test_mistakes_are_one_line(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    for words, says in (
        (["--checkpoints", str(table), "--systems", "mdln"], "did you mean 'mdlm'"),
        (["--checkpoints", str(table), "--steps", "5"], "--steps is for systems that are trained"),
        (["--checkpoints", "no-such-table.yaml"], "there is no table"),
        (["--checkpoints", str(table), "--part", "3/2"], "--part takes I/N"),
        (["--processes", "2"], "belong to --checkpoints"),
    ):
        assert main(["compare", *words, *out]) == 2
        assert says in capsys.readouterr().err


def test_a_table_is_checked_when_it_is_read(tmp_path: Path) -> None:
    for values, says in (
        ({}, "names no `systems`"),
        ({"systems": {"a": {"sauce": "x"}}}, "unknown key of the system a 'sauce': did you mean 'source'"),
        ({"systems": {"a": {"source": "x"}}, "protocoll": "x"}, "did you mean 'protocol'"),
        ({"systems": {"a": {"source": "x", "claim": {"ppl": 1}}}}, "the `claim` of a"),
        ({"systems": {"a": {"source": "x"}}, "num": 1}, "`num`"),
    ):
        (tmp_path / "t.yaml").write_text(yaml.safe_dump(values))
        with pytest.raises(UserError, match=says):
            read_table(tmp_path / "t.yaml")


def test_the_papers_table_can_be_read_and_its_presets_exist() -> None:
    from convergeflow.sampling.settings import PRESETS
    from convergeflow.systems import IMPORTED

    table = read_table("table1")
    assert {"mdlm", "duo", "sedd-absorb", "elf-b", "ar", "flm", "plaid", "convergeflow"} <= {
        e.name for e in table.entries
    }
    for entry in table.entries:
        named = [point["preset"] for point in entry.points if "preset" in point]
        if entry.project in ("langflow", "convergeflow"):
            assert set(named) <= set(PRESETS), entry.name
            continue
        kind = f"published-{entry.project}" if entry.project != "sedd" else f"published-{entry.name}"
        model: Any = IMPORTED[kind]
        assert set(named) <= set(model.presets), entry.name


def test_the_claims_of_the_papers_table_are_the_papers() -> None:
    names = {"ar": "Transformer", "sedd-absorb": "SEDD Absorb", "sedd-uniform": "SEDD Uniform", "mdlm": "MDLM"}
    names |= {"duo": "Duo", "flm": "FLM", "langflow": "LangFlow", "convergeflow": "ConvergeFlow"}
    printed = {system["system"]: (system["gen_ppl"], system["entropy"]) for system in systems()}
    claims = {entry.name: entry.claim for entry in read_table("table1").entries}
    for name, theirs in names.items():
        claim = claims[name]
        assert claim is not None and (claim.gen_ppl, claim.entropy) == printed[theirs], name
    assert claims["langflow"] is not None and claims["langflow"].nfe is None  # the paper does not say


def test_words_for_a_point_and_a_ratio() -> None:
    assert shown({"preset": "published", "nfe": 9}) == "published, nfe 9" and shown({}) == "default"
    assert ratio_to_claim({"gen_ppl": 3.0}, PublishedResult(2.0)) == 1.5
    assert ratio_to_claim({"gen_ppl": None}, PublishedResult(2.0)) is None is ratio_to_claim({"gen_ppl": 3.0}, None)
