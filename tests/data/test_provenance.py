"""The one rule for which real text may judge a model: other tokens and other splits of learned text are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import convergeflow
from convergeflow.cli.main import main
from convergeflow.data.corpus import Corpus
from convergeflow.data.prepare import prepare
from convergeflow.data.provenance import contradiction, facts_of, recalled
from convergeflow.errors import UserError
from convergeflow.evaluation.reference import find_reference
from convergeflow.zoo import load_model, locate

WORDS = ("the", "old", "king", "went", "to", "sea", "with", "a", "small", "red", "boat", "and", "map", "of", "islands")


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path / "cache"))
    rng = random.Random(0)
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(" ".join(rng.choices(WORDS, k=200)) + "\n")
    return folder


def made(text: Path, name: str, share: float, tokenizer: str = "byte", length: int = 16) -> Corpus:
    return prepare([text], text.parent / name, tokenizer=tokenizer, length=length, heldout_share=share)


def test_another_split_of_the_same_text_is_refused_and_another_length_is_not(text: Path) -> None:
    learned, other = made(text, "a", 0.1), made(text, "b", 0.4)
    longer, words = made(text, "c", 0.1, length=32), made(text, "d", 0.1, tokenizer="word")
    trained_on, tokenizer = facts_of(learned), learned.tokenizer
    assert contradiction(learned, tokenizer, trained_on) == ""
    assert contradiction(longer, tokenizer, trained_on) == ""
    assert "another way" in contradiction(other, tokenizer, trained_on)
    assert "tokenizer" in contradiction(words, tokenizer, trained_on)
    assert contradiction(other, tokenizer, None) == "", (
        "a model that does not say what it learned cannot be contradicted"
    )


def test_the_rule_holds_wherever_real_text_is_looked_for(text: Path) -> None:
    learned, other = made(text, "a", 0.1), made(text, "b", 0.4)
    trained_on, tokenizer, said = facts_of(learned), learned.tokenizer, []
    with pytest.raises(UserError, match=r"cannot judge this model.*force"):
        find_reference(str(other.folder), tokenizer, 4, 16, said.append, trained_on=trained_on)
    forced = find_reference(str(other.folder), tokenizer, 4, 16, said.append, trained_on=trained_on, force=True)
    assert forced is not None and "another way" in forced.describe()["forced"] and "forced" in said[-1]
    allowed = find_reference(str(learned.folder), tokenizer, 4, 16, said.append, trained_on=trained_on)
    assert allowed is not None and "forced" not in allowed.describe()


def test_the_training_corpus_is_taken_before_another_one(text: Path) -> None:
    """Two corpora of the cache have the tokenizer; the one with more text was taken, whatever the model had learned."""
    learned = prepare([text], tokenizer="byte", length=16, heldout_share=0.4)
    prepare([text], tokenizer="byte", length=16, heldout_share=0.1)
    found = find_reference(None, learned.tokenizer, 4, 16, lambda said: None, trained_on=facts_of(learned))
    assert found is not None and found.fingerprint == learned.fingerprint


def test_stories_do_not_judge_other_tokens(text: Path) -> None:
    with pytest.raises(UserError, match="tokenizer is not its own"):
        find_reference("stories", made(text, "a", 0.1).tokenizer, 4, 16, lambda said: None)


@pytest.mark.parametrize(
    ("name", "texts", "split"), [("sotu-small", 200, "1796-Washington-1.txt"), ("basic-small", 1, "chapters with")]
)
def test_the_shipped_models_of_natural_text_remember_their_split(name: str, texts: int, split: str) -> None:
    model = load_model(name)
    trained_on = model.trained_on
    assert trained_on is not None and model.tokenizer is not None
    assert trained_on["fingerprint"] in (locate(name) / "card.md").read_text()
    assert trained_on["tokenizer"] == model.tokenizer.sha256 and len(trained_on["texts"]) >= texts
    assert split in trained_on["split"]


def test_a_trained_model_remembers_and_the_command_refuses(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learned, other = made(text, "a", 0.1), made(text, "b", 0.4)
    run = text.parent / "run"
    recipe = text.parent / "recipe.yaml"
    recipe.write_text(
        f"corpus: {{name: a, paths: [{learned.folder}], length: 16}}\nmodel: {{size: test}}\nbatch: 4\n"
        "stages: [{name: ce, objective: ce, steps: 2, lr: 0.001, learn_table: true, learn_schedule: true}]\n"
    )
    assert main(["train", str(recipe), "--out", str(run)]) == 0
    assert recalled(run / "model") == load_model(run).trained_on == facts_of(learned)
    capsys.readouterr()
    command = ["evaluate", str(run), "--num", "4", "--nfe", "4", "--scorer", "none-such", "--corpus", str(other.folder)]
    assert main(command) == 2
    assert "cannot judge this model" in capsys.readouterr().err
    tuning = ["tune", str(run), "--calls", "4", "--num", "4", "--scorer", "none-such", "--corpus", str(other.folder)]
    assert main(tuning) == 2
    assert "cannot judge this model" in capsys.readouterr().err
    with pytest.raises(UserError, match="cannot judge this model"):
        convergeflow.evaluate(run, num=4, nfe=4, scorer="none-such", corpus=str(other.folder))
    assert main([*tuning, "--force"]) != 0
    assert "forced" in capsys.readouterr().err
    assert main([*command, "--force"]) != 0  # goes on, up to the scorer that is not there
    assert "forced" in capsys.readouterr().err
    assert json.loads((run / "model" / "corpus.json").read_text())["split"] == learned.manifest["split"]
