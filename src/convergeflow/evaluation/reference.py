"""The real text that samples are held against: one set to be scored like samples, another to take statistics from.

The two are disjoint, so that the value "for real text" of a distance is not zero by construction. Stories need no
prepared corpus: their law writes fresh ones from a fixed seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convergeflow.data.corpus import Corpus
from convergeflow.data.provenance import TrainedOn, contradiction
from convergeflow.data.stories import StoriesLaw, stories_law
from convergeflow.data.tokenizer import Tokenizer, stories_tokenizer
from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.evaluation.overlap import NgramIndex, training_text
from convergeflow.files import cache_folder
from convergeflow.randomness import derive_seed

OVERLAP = 8
"""Words in a row that count as taken from the training text."""
VERIFIED_BYTES = 1 << 30
"""Larger files of a corpus are compared with their hashes when they are trained on, not whenever text is scored."""
STATISTICS_BLOCKS = 4096
"""Blocks from which n-gram statistics of real text are taken, at most."""


@dataclass(frozen=True, eq=False)  # one object is one reference: what is computed from it can be kept
class Reference:
    """Real text in the samples' vocabulary and length."""

    name: str
    fingerprint: str
    vocabulary: int
    length: int
    tokenizer: Tokenizer | None = None
    real: NDArray[Any] | None = None
    """Held-out blocks that are scored exactly like samples, [n, length]."""
    statistics: NDArray[Any] | None = None
    """Other held-out blocks, [m, length]."""
    training: NDArray[Any] | NgramIndex | None = None
    """Training blocks, which may be a memory map, or the n-grams of a text that is too large to search."""
    law: StoriesLaw | None = None
    folder: Path | None = None
    """Where the corpus lies."""
    forced: str = ""
    """What speaks against holding these samples against it, where the user wanted it all the same."""

    def describe(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "real_blocks": 0 if self.real is None else len(self.real),
            "statistics_blocks": 0 if self.statistics is None else len(self.statistics),
            "training_blocks": 0 if self.training is None else len(self.training),
            **({"overlap_by": "bloom"} if isinstance(self.training, NgramIndex) else {}),
            **({"forced": self.forced} if self.forced else {}),
        }


def corpus_reference(corpus: Corpus, num: int, length: int) -> Reference:
    """`num` held-out blocks to score and the others for statistics; half of them where there are too few for both."""
    if length > corpus.length:
        raise UserError(
            f"samples of {length} tokens cannot be held against blocks of {corpus.length}: prepare the corpus with "
            f"`length` {length}"
        )
    corpus.verify(largest=VERIFIED_BYTES)
    law = stories_law() if corpus.name == "stories" else None
    order = np.random.default_rng(derive_seed(0, "reference", corpus.fingerprint)).permutation(len(corpus.heldout))
    if len(order) < 2:
        raise UserError(
            f"the corpus {corpus.name} holds out {len(order)} of the 2 blocks that a comparison with real text needs: "
            "prepare it again from more text, with a larger `heldout_share` or a smaller `length`"
        )
    take = min(num, len(order) // 2)
    real, rest = np.sort(order[:take]), np.sort(order[take : take + STATISTICS_BLOCKS])
    return Reference(
        corpus.name,
        corpus.fingerprint,
        corpus.vocabulary,
        length,
        corpus.tokenizer,
        np.asarray(corpus.heldout[real, :length], dtype=np.int64),
        np.asarray(corpus.heldout[rest, :length], dtype=np.int64),
        training_text(corpus, OVERLAP),
        law,
        corpus.folder,
    )


def stories_reference(num: int, length: int, *, training: NDArray[Any] | None = None) -> Reference:
    """Fresh stories from the law; `training` blocks are needed only for the overlap with them."""
    law = stories_law()
    rng = np.random.default_rng(derive_seed(0, "reference", "stories"))
    return Reference(
        "stories",
        f"law-{law.sha256[:16]}",
        len(law.vocabulary),
        length,
        stories_tokenizer(),
        law.sample(rng, num, length),
        law.sample(rng, min(max(4 * num, 256), STATISTICS_BLOCKS), length),
        training,
        law,
    )


def find_reference(
    corpus: str | None,
    tokenizer: Tokenizer | None,
    num: int,
    length: int,
    say: Callable[[str], None],
    *,
    trained_on: TrainedOn | None = None,
    force: bool = False,
) -> Reference | None:
    """The real text for samples: a corpus by name or folder, or else one that has the samples' own tokenizer.

    None if nothing fits; `say` hears which was taken. A corpus that contradicts the training set (`provenance`) is
    refused, unless the user forces it: then `say` hears why it should not be.
    """
    if corpus is not None and (Path(corpus) / "manifest.json").is_file():
        return _allowed(Corpus.open(corpus), tokenizer, trained_on, force, say, num, length)
    wanted = None if tokenizer is None else tokenizer.sha256
    prepared = [entry for entry in prepared_corpora() if entry.length >= length]
    stories = stories_tokenizer().sha256
    if corpus == "stories" or (corpus is None and wanted == stories):
        if wanted not in (None, stories):
            raise UserError("the stories cannot judge this model: their tokenizer is not its own; give another corpus")
        return _fresh_stories(prepared, num, length, say)
    fitting = [
        entry
        for entry in prepared
        if (entry.name == corpus if corpus is not None else entry.manifest["tokenizer"]["sha256"] == wanted)
    ]
    if fitting:
        chosen = _nearest(fitting, tokenizer, trained_on)
        say(f"real text: {chosen.name}, blocks of {chosen.length} ({chosen.folder})")
        return _allowed(chosen, tokenizer, trained_on, force, say, num, length)
    if corpus is None:
        return None
    raise UserError(
        f"no prepared corpus {corpus!r} with blocks of at least {length} tokens: "
        f"`convergeflow prepare {corpus}` with `length` {length}, or give its folder"
    )


def _fresh_stories(prepared: list[Corpus], num: int, length: int, say: Callable[[str], None]) -> Reference:
    """New stories, and the prepared ones that may have been trained on."""
    written = [entry.train for entry in prepared if entry.name == "stories" and entry.length == length]
    if not written:
        say("no prepared stories of this length on this machine: the overlap with training text is left out")
    return stories_reference(num, length, training=max(written, key=len, default=None))


def _nearest(fitting: list[Corpus], tokenizer: Tokenizer | None, trained_on: TrainedOn | None) -> Corpus:
    """The training corpus itself before others, and one that nothing speaks against before one that is refused."""
    own = "" if trained_on is None else trained_on["fingerprint"]

    def order(entry: Corpus) -> tuple[bool, bool, int, int]:
        refused = contradiction(entry, tokenizer, trained_on) != ""
        return entry.fingerprint != own, refused, entry.length, -len(entry.train)

    return min(fitting, key=order)


def _allowed(
    corpus: Corpus,
    tokenizer: Tokenizer | None,
    trained_on: TrainedOn | None,
    force: bool,
    say: Callable[[str], None],
    num: int,
    length: int,
) -> Reference:
    """The reference of a corpus, if nothing speaks against it or the user wants it all the same."""
    wrong = contradiction(corpus, tokenizer, trained_on)
    if wrong and not force:
        raise UserError(f"{corpus.folder} cannot judge this model: {wrong}; give another corpus, or `force` it")
    reference = corpus_reference(corpus, num, length)
    if not wrong:
        return reference
    say(f"forced: {corpus.folder} judges this model though {wrong}")
    if tokenizer is not None and reference.tokenizer is not None and tokenizer.sha256 != reference.tokenizer.sha256:
        # Ids mean other words: nothing that counts them can be compared.
        reference = replace(reference, statistics=None, training=None, law=None)
    return replace(reference, forced=wrong)


def prepared_corpora() -> list[Corpus]:
    """Every whole corpus in the cache folder."""
    found = []
    for manifest in sorted((cache_folder() / "corpora").glob("*/manifest.json")):
        with contextlib.suppress(ConvergeFlowError):
            found.append(Corpus.open(manifest.parent))
    return found
