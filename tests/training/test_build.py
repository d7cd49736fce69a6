from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from convergeflow.data.tokenizer import Tokenizer, train_words
from convergeflow.errors import UserError
from convergeflow.training.build import build_model, introduce, known_rows, load_weights, open_corpus
from convergeflow.training.config import resolve


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def test_weights_are_a_function_of_the_seed() -> None:
    torch.manual_seed(1)
    first = build_model(resolve("test"), 20).state_dict()
    torch.manual_seed(2)
    again = build_model(resolve("test"), 20).state_dict()
    other = build_model(resolve("test", ["seed=1"]), 20).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_model(resolve("test"), 20)
    assert torch.equal(torch.rand(3), expected)


def test_configuration_reaches_the_model() -> None:
    model = build_model(
        resolve(
            "test", ["model.predictor=direct", "model.gate_init=0.5", "model.context_free_input=true", "recompute=true"]
        ),
        20,
    )
    assert model.config.predictor == "direct" and model.config.gate_init == 0.5 and model.config.context_free_input
    assert model.network.backbone.recompute
    assert model.config.schedule["loc"] == pytest.approx(4.723 - math.log(768 / 32))
    assert build_model(resolve("test", ["model.schedule.kind=cosine"]), 20).learned_schedule is None


def test_entropy_of_the_schedule_starts_at_the_unigram_entropy() -> None:
    config = resolve("test")
    corpus = open_corpus(config)
    model = build_model(config, corpus.vocabulary)
    introduce(model, corpus, config)
    assert model.learned_schedule.entropy.item() == pytest.approx(corpus.unigram_entropy, abs=0.01)
    given = resolve("test", ["model.schedule.entropy=3"])
    introduce(model, corpus, given)
    assert model.learned_schedule.entropy.item() == 3.0


@pytest.mark.parametrize("method", ["convergeflow", "mdlm"])
def test_a_table_can_start_from_what_stands_around_tokens(method: str) -> None:
    start = "head_start" if method == "mdlm" else "head_init"
    config = resolve("test", ["table=contexts", f"model.{start}=0.02", f"model.method={method}"])
    corpus = open_corpus(config)
    fresh, model = (build_model(config, corpus.vocabulary) for _ in range(2))
    introduce(model, corpus, config)
    before, after = fresh.network.embedding.weight, model.network.embedding.weight
    assert torch.allclose(before.norm(dim=1), after.norm(dim=1), atol=1e-5)  # rows turn and keep their length
    alike = torch.nn.functional.normalize(after, dim=1)
    ids = {token: index for index, token in enumerate(corpus.tokenizer.tokens())}
    names, other = [ids["tom"], ids["ben"]], ids["."]
    assert alike[names[0]] @ alike[names[1]] > 0.2 + alike[names[0]] @ alike[other]
    assert torch.equal(before[corpus.vocabulary :], after[corpus.vocabulary :])  # a mask has no neighbours
    if method == "mdlm":
        rows = after[: corpus.vocabulary]
        torch.testing.assert_close(model.network.head.weight, 0.02 * rows / rows.square().mean().sqrt())
    else:
        torch.testing.assert_close(model.network.head.weight, 0.02 * model.network.embedding.rows())
    assert "table" not in resolve("test").to_dict()  # kept results are found by their configuration


def test_unknown_method_and_unknown_option() -> None:
    with pytest.raises(UserError, match="did you mean 'convergeflow'"):
        build_model(resolve("test", ["model.method=convergflow"]), 20)
    with pytest.raises(UserError, match=r"model\.masks"):
        build_model(resolve("test", ["model.options.masks=1"]), 20)


def test_start_from_another_checkpoint(tmp_path: Path) -> None:
    source = build_model(resolve("test", ["seed=3"]), 20)
    source.save_pretrained(tmp_path / "a")
    target = build_model(resolve("test"), 20)
    load_weights(target, tmp_path / "a")
    own, given = dict(target.named_parameters()), dict(source.named_parameters())
    assert all(torch.equal(own[name], given[name]) for name in own)
    with pytest.raises(UserError, match=r"network\.embedding\.weight is \(20, 32\), not \(21, 32\)"):
        load_weights(build_model(resolve("test"), 21), tmp_path / "a")
    with pytest.raises(UserError, match=r"missing: network\.backbone\.blocks\.2"):
        load_weights(build_model(resolve("test", ["model.depth=3"]), 20), tmp_path / "a")
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        load_weights(target, tmp_path / "missing")
    (tmp_path / "a" / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(UserError, match="is damaged"):
        load_weights(target, tmp_path / "a")


def test_a_launch_does_not_wait_for_a_long_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as caught:
        open_corpus(resolve("owt"), large=False)
    command = "convergeflow prepare hf:Skylion007/openwebtext --tokenizer gpt2 --vocabulary 50257 --length 1024"
    assert str(caught.value).endswith(f"first run {command}")
    assert open_corpus(resolve("test"), large=False).name == "stories"
    # Files are large by their size, and only until they are prepared.
    (tmp_path / "a.txt").write_text("some words of mine\n" * 50)
    config = resolve("test", [f"corpus.paths=[{tmp_path / 'a.txt'}]", "corpus.tokenizer=byte", "corpus.blocks=null"])
    monkeypatch.setattr("convergeflow.data.prepare.LARGE", 100)
    with pytest.raises(UserError, match="convergeflow prepare"):
        open_corpus(config, large=False)
    assert open_corpus(config).fingerprint == open_corpus(config, large=False).fingerprint


def test_what_is_prepared_by_hand_is_what_a_recipe_opens(tmp_path: Path) -> None:
    """The numbers that go without saying do not make another corpus of it."""
    import pyarrow
    import pyarrow.parquet

    from convergeflow.data.prepare import prepare

    texts = [f"document {number} with some words" for number in range(60)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "train.parquet")
    by_hand = prepare(f"hf:{tmp_path}", tokenizer="byte", length=16)
    changes = [f"corpus.name=hf:{tmp_path}", "corpus.tokenizer=byte", "corpus.vocabulary=257", "corpus.length=16"]
    changes.append("corpus.windows=random")
    assert open_corpus(resolve("owt", changes), large=False).folder == by_hand.folder


# --- an old trunk and a new vocabulary ---


def test_known_rows() -> None:
    before = ["<end>", "cat", "dog", "\u0120sat"]
    assert known_rows(["dog", "<end>", "bird"], before) == [2, 0, None]
    # The word with the space before it is the word of a vocabulary without spaces; no row is taken twice.
    assert known_rows(["\u0120cat", "sat", "cat"], before) == [None, 3, 1]
    assert known_rows(["\u0120cat", "Cat"], before) == [1, None]


def words(text: str) -> Tokenizer:
    return train_words([text], 100)


@pytest.mark.parametrize("method", ["convergeflow", "ar", "mdlm"])
def test_a_new_vocabulary_keeps_the_trunk_and_the_rows_of_known_words(tmp_path: Path, method: str) -> None:
    """The second tokenizer has as many words as the first, in another order: rows must follow their words."""
    old, new = words("a a a b b c"), words("c c c d d a")
    assert old.size == new.size
    config = resolve("test", [f"model.method={method}"])
    source = build_model(resolve("test", [f"model.method={method}", "seed=3"]), old.size)
    for parameter in source.parameters():  # heads start at zero, which would hide where a row came from
        torch.nn.init.normal_(parameter.data)
    source.tokenizer = old
    source.save_pretrained(tmp_path / "a")
    target = build_model(config, new.size)
    fresh = {name: parameter.clone() for name, parameter in target.named_parameters()}
    assert load_weights(target, tmp_path / "a", new) == 1  # d
    per_token = {"network.embedding.weight", "network.head.weight", "network.head.bias"}
    given = dict(source.named_parameters())
    rows = {word: (new.encode(word)[0], old.encode(word)[0]) for word in "ac"}
    for name, parameter in target.named_parameters():
        if name not in per_token:
            assert torch.equal(parameter, given[name]), name
            continue
        for place, was in rows.values():
            assert torch.equal(parameter[place], given[name][was]), name
        unknown = new.encode("d")[0]
        assert torch.equal(parameter[unknown], fresh[name][unknown]), name
        assert torch.equal(parameter[new.size :], given[name][old.size :]), name  # the mask of a masked system


def test_another_number_of_words(tmp_path: Path) -> None:
    old, new = words("a a a b b c"), words("a b c d e f g")
    source = build_model(resolve("test", ["seed=3"]), old.size)
    source.tokenizer = old
    source.save_pretrained(tmp_path / "a")
    target = build_model(resolve("test"), new.size)
    assert load_weights(target, tmp_path / "a", new) == 4
    table = target.network.embedding.weight
    assert torch.equal(table[new.encode("b")[0]], source.network.embedding.weight[old.encode("b")[0]])
    with pytest.raises(UserError, match="does not fit"):  # a network of another size cannot be taken over
        load_weights(build_model(resolve("test", ["model.width=16"]), new.size), tmp_path / "a", new)


def test_the_same_tokenizer_changes_no_row(tmp_path: Path) -> None:
    tokenizer = words("a a a b b c")
    source = build_model(resolve("test", ["seed=3"]), tokenizer.size)
    source.tokenizer = tokenizer
    source.save_pretrained(tmp_path / "a")
    target = build_model(resolve("test"), tokenizer.size)
    assert load_weights(target, tmp_path / "a", tokenizer) is None
    assert torch.equal(target.network.embedding.weight, source.network.embedding.weight)
