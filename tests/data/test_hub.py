"""Datasets of the hub: the right files at one commit, mistakes in one line, nothing run. The hub here is a folder."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import errors

from convergeflow.data import hub
from convergeflow.data.prepare import prepare
from convergeflow.errors import ConvergeFlowError, UserError

COMMITS = {"refs/convert/parquet": "c" * 40, "main": "m" * 40, "v1": "1" * 40}


def article(number: int) -> str:
    return f"Article {number}. " + " ".join(f"word{(number * place) % 97}" for place in range(1, 60))


def table(file: Path, numbers: range, column: str = "text", **options: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({column: [article(number) for number in numbers]}), file, **options)


@pytest.fixture
def standin(tmp_path: Path) -> Path:
    """A copy of a dataset with the names of the hub's conversion."""
    folder = tmp_path / "openwebtext"
    table(folder / "plain_text" / "train" / "0000.parquet", range(120), row_group_size=16)
    table(folder / "plain_text" / "train" / "0001.parquet", range(120, 200), row_group_size=16)
    table(folder / "plain_text" / "test" / "0000.parquet", range(200, 210))
    (folder / ".cache").mkdir()
    (folder / ".cache" / "train-00000-of-00009.parquet").write_bytes(b"not part of the dataset")
    return folder


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list[str]]:
    """The hub's two answers, from a dict of revision -> files; files are tables of twenty articles."""
    trees: dict[str, list[str]] = {}
    known = set(COMMITS.values())

    class Api:
        def dataset_info(self, name: str, *, revision: str, files_metadata: bool) -> Any:
            response: Any = types.SimpleNamespace(headers={}, request=None, status_code=404)
            if name != "some/set":
                raise errors.RepositoryNotFoundError("404", response=response)
            if revision not in trees:
                raise errors.RevisionNotFoundError("404", response=response)
            files = [types.SimpleNamespace(rfilename=file, size=1000) for file in trees[revision]]
            return types.SimpleNamespace(sha=COMMITS[revision], siblings=files)

    def download(name: str, file: str, *, repo_type: str, revision: str) -> str:
        assert repo_type == "dataset" and revision in known
        place = tmp_path / "downloads" / revision / file
        if not place.exists():
            number = sum(map(ord, file)) % 1000
            table(place, range(number, number + 20))
        return str(place)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return trees


def documents_of(corpus: Any) -> set[str]:
    ids = np.concatenate([corpus.train.ravel(), corpus.heldout.ravel()])
    return {line.split(".")[0] for line in corpus.tokenizer.decode(ids).split("\n") if line.startswith("Article")}


def test_a_folder_behind_hf_is_read_like_the_hub(standin: Path) -> None:
    corpus = prepare(f"hf:{standin}", tokenizer="byte", length=16, heldout_share=0.2)
    assert corpus.name == "openwebtext"
    assert len(documents_of(corpus) - {f"Article {number}" for number in range(200)}) == 0
    assert len(documents_of(corpus)) >= 198  # what is cut off at the ends of both splits may hold a heading
    ends = [int((split == 256).sum()) for split in (corpus.train, corpus.heldout)]
    assert sum(ends) >= 198 and 20 < ends[1] < 65
    source = corpus.manifest["source"]
    assert [file["name"] for file in source["files"]] == [
        "plain_text/train/0000.parquet",
        "plain_text/train/0001.parquet",
    ]
    assert str(standin.parent) not in json.dumps(corpus.manifest)


def test_the_default_is_the_conversion_and_its_commit_is_recorded(remote: dict[str, list[str]]) -> None:
    remote["refs/convert/parquet"] = ["plain_text/train/0000.parquet"]
    remote["main"] = ["set.py", "data/train-00000-of-00001.parquet"]
    source = prepare("hf:some/set", tokenizer="byte", length=16).manifest["source"]
    assert (source["revision"], source["commit"]) == ("refs/convert/parquet", "c" * 40)
    source = prepare("hf:some/set@main", tokenizer="byte", length=16).manifest["source"]
    assert (source["revision"], source["commit"]) == ("main", "m" * 40)
    assert [file["name"] for file in source["files"]] == ["data/train-00000-of-00001.parquet"]


def test_where_the_conversion_is_only_a_part_the_main_branch_is_taken(remote: dict[str, list[str]]) -> None:
    remote["refs/convert/parquet"] = ["plain_text/partial-train/0000.parquet"]
    remote["main"] = ["README.md", "plain_text/train-00000-of-00002.parquet", "plain_text/train-00001-of-00002.parquet"]
    assert prepare("hf:some/set", tokenizer="byte", length=16).manifest["source"]["commit"] == "m" * 40
    with pytest.raises(UserError, match=r"only a part of the split 'train'.*partial-train"):
        prepare("hf:some/set@refs/convert/parquet", tokenizer="byte", length=16)
    part = prepare("hf:some/set@refs/convert/parquet", dataset_split="partial-train", tokenizer="byte", length=16)
    assert part.manifest["source"]["commit"] == "c" * 40


def test_a_prepared_dataset_needs_no_network(remote: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    remote["v1"] = ["train.parquet"]
    first = prepare("hf:some/set@v1", tokenizer="byte", length=16)
    monkeypatch.setattr(hub, "_tree", None)  # would fail if called
    assert prepare("hf:some/set@v1", tokenizer="byte", length=16).folder == first.folder


def test_a_stopped_run_keeps_its_commit(remote: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    remote["main"] = ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    whole = prepare("hf:some/set@main", tokenizer="byte", length=16)

    def stop(stage: str, done: int, total: int | None) -> None:
        if stage.startswith("packing"):
            raise KeyboardInterrupt

    options: dict[str, Any] = {"tokenizer": "byte", "length": 16}
    with pytest.raises(KeyboardInterrupt):
        prepare("hf:some/set@main", whole.folder.with_name("again"), progress=stop, **options)
    monkeypatch.setitem(COMMITS, "main", "9" * 40)  # somebody pushes
    again = prepare("hf:some/set@main", whole.folder.with_name("again"), **options)
    assert again.manifest["source"]["commit"] == "m" * 40 and again.fingerprint == whole.fingerprint


@pytest.mark.parametrize(
    ("tree", "address", "settings", "message"),
    [
        (["README.md", "set.py"], "some/set@main", {}, r"loading script \(set\.py\).*hf:NAME@refs/convert/parquet"),
        (["README.md", "a.zip"], "some/set@main", {}, "no parquet files.*@refs/convert/parquet"),
        (["train.parquet"], "some/set@v9", {}, "no revision 'v9'"),
        (["train.parquet"], "some/other@main", {}, "no dataset 'some/other'"),
        (["train.parquet"], "some/set/more", {}, "neither a folder nor the name of a dataset"),
        (["train.parquet"], "some/set@main", {"dataset_split": "tset"}, r"no split 'tset' \(it has train\)"),
        (["en/train/0.parquet", "de/train/0.parquet"], "some/set@main", {}, r"several configurations.*de, en"),
        (["en/train/0.parquet"], "some/set@main", {"dataset_config": "fr"}, r"no configuration 'fr' \(it has en\)"),
        (["train-00000-of-00003.parquet"], "some/set@main", {}, "1 of the 3 files"),
        (["train.parquet"], "some/set@main", {"text_field": "body"}, "no column 'body'"),
    ],
)
def test_mistakes_are_one_line(
    remote: dict[str, list[str]], tree: list[str], address: str, settings: dict[str, Any], message: str
) -> None:
    remote["main"] = tree
    with pytest.raises(UserError, match=message) as caught:
        prepare(f"hf:{address}", tokenizer="byte", **settings)
    assert "\n" not in str(caught.value)


def test_no_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> Any:
        raise OSError("no\nroute")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    with pytest.raises(ConvergeFlowError, match=r"cannot reach the hub for hf:x/y: no route; .*hf:FOLDER"):
        prepare("hf:x/y", tokenizer="byte")


def test_a_limit_counts_documents(standin: Path) -> None:
    corpus = prepare(f"hf:{standin}", tokenizer="byte", length=16, documents=150)
    assert 148 <= sum(int((split == 256).sum()) for split in (corpus.train, corpus.heldout)) <= 150
