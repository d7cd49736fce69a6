"""Datasets of the Hugging Face hub: the parquet files of one split at one commit, read like the user's own files.

    hf:NAME            the hub's parquet conversion of the dataset, or its main branch where that holds the whole split
    hf:NAME@REVISION   a branch, a tag or a commit that holds parquet files
    hf:FOLDER          a copy on this machine, with the same names in it

The commit is looked up once, written into the manifest, and kept when a stopped run goes on. Files are loaded one by
one when their turn comes. Code of a dataset is never run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from convergeflow.data.sources import START, Document, Place, Progress, mark_of, read_texts
from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.files import file_hash

CONVERSION = "refs/convert/parquet"
"""The branch in which the hub keeps its own conversion of a dataset."""


@dataclass
class Hub:
    """One split of a dataset; `address` is what stands behind `hf:`."""

    address: str
    config: str | None = None
    split: str = "train"
    text_field: str = "text"
    heldout_share: float = 0.05
    limit: int | None = None
    _facts: dict[str, Any] = field(default_factory=dict)
    """Of `survey`: revision, commit, and the files with their sizes."""

    def __post_init__(self) -> None:
        self._folder = Path(self.address).expanduser()
        self._local = self._folder.is_dir()
        name, _, revision = (self.address, "", "") if self._local else self.address.partition("@")
        self.name = self._folder.resolve().name if self._local else name
        self._revision = revision or None
        if not self._local and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            raise UserError(f"hf:{self.address} is neither a folder nor the name of a dataset (hf:OWNER/NAME@REVISION)")

    def key(self) -> dict[str, Any]:
        """A name and a revision: the commit behind them is in the manifest, so a prepared corpus opens offline."""
        where: list[Any] = [self.name, self._revision]
        if self._local:
            stats = [(name, (self._folder / name).stat()) for name, _ in self._listed()]
            where = [str(self._folder.resolve()), [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]]
        return {
            "hub": where,
            "config": self.config,
            "split": self.split,
            "text_field": self.text_field,
            "heldout_share": self.heldout_share,
            "limit": self.limit,
        }

    def survey(self, progress: Progress) -> dict[str, Any]:
        progress("opening the dataset", 0, None)
        if self._local:
            files = choose(dict(self._listed()), self.config, self.split, f"hf:{self.address}")
            listed = [
                {"name": name, "bytes": size, "sha256": file_hash(self._folder / name)} for name, size in files.items()
            ]
            self._facts = {"revision": None, "commit": None, "files": listed}
        else:
            revision, commit, files = self._look_up()
            listed = [{"name": name, "bytes": size} for name, size in files.items()]
            self._facts = {"revision": revision, "commit": commit, "files": listed}
        return self._facts

    def recall(self, facts: dict[str, Any], progress: Progress) -> None:
        self._facts = facts

    def size(self) -> int | None:
        if self._facts:
            return sum(file["bytes"] for file in self._facts["files"])
        return sum(size for _, size in self._listed()) if self._local else None

    def documents(self, start: Place = START) -> Iterator[Document]:
        names = [file["name"] for file in self._facts["files"]]
        paths = _Fetched(self.name, self._facts["commit"], self._folder if self._local else None, names)
        for text, place in read_texts(paths, self.text_field, self.limit, start):
            mark = int.from_bytes(mark_of(text), "big") / 2**64
            yield Document(text, "heldout" if mark < self.heldout_share else "train", place)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "hub",
            "dataset": self.name,
            **self._facts,
            "config": self.config,
            "split": self.split,
            "text_field": self.text_field,
            "limit": self.limit,
        }

    def split_rule(self) -> str:
        return f"documents whose BLAKE2b hash lies in the lowest {self.heldout_share:.4g}"

    def _listed(self) -> Iterator[tuple[str, int]]:
        """Name and size of the files in the folder."""
        for path in sorted(self._folder.rglob("*")):
            relative = path.relative_to(self._folder)
            if path.is_file() and not any(part.startswith(".") for part in relative.parts):
                yield relative.as_posix(), path.stat().st_size

    def _look_up(self) -> tuple[str, str, dict[str, int]]:
        """The revision that is meant, its commit, and the files of the split."""
        if self._revision is not None:
            commit, files = _tree(self.name, self._revision)
            return self._revision, commit, choose(files, self.config, self.split, f"hf:{self.address}")
        # The hub converts large datasets only in part; some of those hold parquet files themselves.
        refusal: UserError | None = None
        for revision in (CONVERSION, "main"):
            try:
                commit, files = _tree(self.name, revision)
                return revision, commit, choose(files, self.config, self.split, f"hf:{self.name}@{revision}")
            except UserError as failure:
                refusal = refusal or failure
        assert refusal is not None
        raise refusal


class _Fetched(Sequence[Path]):
    """The files of a split as paths; one that is not on this machine is loaded when it is asked for."""

    def __init__(self, name: str, commit: str | None, folder: Path | None, names: Sequence[str]) -> None:
        self._name, self._commit, self._folder, self._names = name, commit, folder, names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: Any) -> Any:
        name = self._names[index]
        if self._folder is not None:
            return self._folder / name
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(self._name, name, repo_type="dataset", revision=self._commit))
        except Exception as failure:
            raise ConvergeFlowError(
                f"cannot load {name} of hf:{self._name}: {_short(failure)}; the same command goes on from here"
            ) from failure


def choose(files: dict[str, int], config: str | None, split: str, said: str) -> dict[str, int]:
    """The parquet files of a configuration's split, in their order; a dataset without them is refused.

    Names are CONFIG/SPLIT/0000.parquet, as the hub writes them, or FOLDER/SPLIT-00000-of-00080.parquet, as most
    datasets do.
    """
    tables = {name: size for name, size in sorted(files.items()) if name.endswith(".parquet")}
    if not tables:
        script = next((file for file in sorted(files) if file.endswith(".py")), None)
        what = f"is a loading script ({script}), which is never run" if script else "has no parquet files"
        raise UserError(f"{said} {what}: take the hub's parquet conversion of the dataset, hf:NAME@{CONVERSION}")
    if config is not None:
        configs = sorted({file.split("/")[0] for file in tables if "/" in file})
        if config not in configs:
            raise UserError(f"{said} has no configuration {config!r} (it has {', '.join(configs) or 'none'})")
        tables = {file: size for file, size in tables.items() if file.startswith(f"{config}/")}
    splits = sorted({_split_of(file) for file in tables})
    if split not in splits and f"partial-{split}" in splits:
        raise UserError(
            f"{said} holds only a part of the split {split!r}: name a revision that has all of it, or take the "
            f"part with `dataset_split` partial-{split}"
        )
    if split not in splits:
        raise UserError(f"{said} has no split {split!r} (it has {', '.join(splits)}): choose one with `dataset_split`")
    return _whole({file: size for file, size in tables.items() if _split_of(file) == split}, said)


def _whole(chosen: dict[str, int], said: str) -> dict[str, int]:
    """The files of a split, if they are all of it and of it alone."""
    folders = sorted({file.rpartition("/")[0].split("/")[0] for file in chosen})
    if len(folders) > 1:
        raise UserError(f"{said} has several configurations: choose one with `dataset_config` ({', '.join(folders)})")
    last = re.search(r"-of-(\d+)\.parquet$", next(iter(chosen)))
    if last is not None and int(last[1]) != len(chosen):
        raise UserError(f"{said} has {len(chosen)} of the {int(last[1])} files of the split; load the others")
    return chosen


def _split_of(file: str) -> str:
    """`train` of plain_text/train/0000.parquet, data/train-00000-of-00080.parquet and train.parquet."""
    path = PurePosixPath(file)
    if re.fullmatch(r"\d+", path.stem):
        return path.parent.name
    return re.sub(r"-\d+(-of-\d+)?$", "", path.stem)


def _tree(name: str, revision: str) -> tuple[str, dict[str, int]]:
    """The commit of a revision and its files with their sizes."""
    from huggingface_hub import HfApi, errors

    try:
        found = HfApi().dataset_info(name, revision=revision, files_metadata=True)
    except errors.RevisionNotFoundError as failure:
        raise UserError(
            f"hf:{name} has no revision {revision!r}: give a branch, a tag or a commit, or leave @{revision} out"
        ) from failure
    except errors.GatedRepoError as failure:
        raise UserError(f"hf:{name} asks for a login: accept its terms on the hub, then `hf auth login`") from failure
    except errors.RepositoryNotFoundError as failure:
        raise UserError(f"there is no dataset {name!r} on the hub that you may read") from failure
    except Exception as failure:
        raise ConvergeFlowError(
            f"cannot reach the hub for hf:{name}: {_short(failure)}; without a network give a copy, hf:FOLDER"
        ) from failure
    return str(found.sha), {file.rfilename: int(file.size or 0) for file in found.siblings or ()}


def _short(failure: Exception) -> str:
    return " ".join(str(failure).split())[:200]
