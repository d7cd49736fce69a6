"""Text to ids and back: words, words with bytes to fall back on, bytes, byte-level BPE, GPT-2's BPE, behind one class.

Each is a `tokenizers` pipeline in a `tokenizer.json`, with a `tokenizer_config.json` that lets
`transformers.AutoTokenizer` read the same folder. Plain text never encodes to the end token: it separates documents and
is put there by whoever packs them.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from pydantic import BaseModel, StrictStr
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from convergeflow.data.fetch import fetched
from convergeflow.data.program import END_TOKEN
from convergeflow.data.stories import BOYS, GIRLS, stories_law
from convergeflow.errors import UserError, unknown_name
from convergeflow.files import MOST_JSON_BYTES, read_json, write_text

KINDS = ("word", "word-byte", "bpe", "byte", "gpt2")
LEARNED = tuple(kind for kind in KINDS if kind not in ("byte", "gpt2"))
"""Those that are learned from text, with as many tokens as one likes."""
MOST_TOKENS = 1 << 22
"""The largest vocabulary that is learned."""
UNKNOWN = "<unknown>"
GPT2_END = "<|endoftext|>"


class EndToken(BaseModel):
    """An end token as some projects write it."""

    content: StrictStr


class OwnFacts(BaseModel):
    """What this package adds to a tokenizer_config.json."""

    kind: StrictStr = "given"
    capitals: list[StrictStr] = []


class TokenizerConfig(BaseModel):
    """What is read of a tokenizer_config.json; it holds more."""

    eos_token: StrictStr | EndToken = GPT2_END
    convergeflow: OwnFacts = OwnFacts()


class Tokenizer:
    """Ids of texts. `size` ids; `end_id` closes a document; `kind` is one of KINDS or `given`."""

    def __init__(self, pipeline: tokenizers.Tokenizer, *, kind: str, end: str, capitals: Sequence[str] = ()) -> None:
        end_id = pipeline.token_to_id(end)
        if end_id is None:
            raise UserError(f"the tokenizer has no token {end!r} to end a document")
        self.kind, self.end, self.end_id = kind, end, int(end_id)
        self.capitals = tuple(capitals)
        """Words that `decode` writes with a capital (word tokenizers fold case)."""
        self._pipeline = pipeline
        pipeline.encode_special_tokens = True

    @property
    def size(self) -> int:
        return int(self._pipeline.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts; uses all cores."""
        try:
            # "fast" leaves out where in the text each token lies.
            return [found.ids for found in self._pipeline.encode_batch_fast(list(texts), add_special_tokens=False)]
        except Exception:
            # A word tokenizer without a token for unknown words refuses them; everything else is not expected.
            for text in texts:
                self.check_known(text)
            raise

    def check_known(self, text: str) -> None:
        """Refuse a text with a word that a word tokenizer does not know, and name the nearest words that it knows."""
        normalizer, cutter = self._pipeline.normalizer, self._pipeline.pre_tokenizer
        if self.kind != "word" or normalizer is None or cutter is None:
            return
        known = self._pipeline.get_vocab()
        words = cutter.pre_tokenize_str(normalizer.normalize_str(text))
        unknown = next((word for word, _ in words if word not in known), None)
        if unknown is not None:
            near = difflib.get_close_matches(unknown, sorted(filter(str.isalpha, known)), n=3, cutoff=0.0)
            raise UserError(
                f"{unknown!r} is not in the vocabulary of this word tokenizer; the nearest words that it knows are "
                f"{', '.join(near)}"
            )

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; an end token becomes a line break."""
        documents: list[list[int]] = [[]]
        for index in ids:
            if int(index) == self.end_id:
                documents.append([])
            else:
                documents[-1].append(int(index))
        if self.kind == "word":
            texts = [self._sentences(document) for document in documents]
        else:
            texts = self._pipeline.decode_batch(documents, skip_special_tokens=False)
        return "\n".join(texts).rstrip("\n")

    def _sentences(self, ids: Sequence[int]) -> str:
        capitals, text, starts = set(self.capitals), "", True
        for word in (self._pipeline.id_to_token(index) or UNKNOWN for index in ids):
            glued = not text or bool(re.fullmatch(r"[.,;:!?)]", word))
            shown = word[:1].upper() + word[1:] if starts or word in capitals else word
            text += shown if glued else f" {shown}"
            starts = word in (".", "!", "?")
        return text

    def tokens(self) -> list[str]:
        """Every token as it stands in the vocabulary, by id."""
        vocabulary = self._pipeline.get_vocab(with_added_tokens=True)
        return sorted(vocabulary, key=vocabulary.__getitem__)

    @cached_property
    def sha256(self) -> str:
        """A hash of everything that decides the ids."""
        return hashlib.sha256(self._pipeline.to_str().encode()).hexdigest()

    # --- folders ---

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "tokenizer_class": "ConvergeFlowTokenizer",  # plain fast tokenizer where this package is not imported
            "eos_token": self.end,
            "clean_up_tokenization_spaces": False,
            "convergeflow": {"kind": self.kind, "capitals": list(self.capitals)},
        }
        # The second one last: where it is, both are whole.
        write_text(folder / "tokenizer_config.json", json.dumps(config, indent=1))
        write_text(folder / "tokenizer.json", self._pipeline.to_str(pretty=True))

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read what `save` wrote, or the `tokenizer.json` of another project with an end-of-text token."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"no tokenizer.json in {folder}")
        if path.stat().st_size > MOST_JSON_BYTES:
            raise UserError(f"{path} has {path.stat().st_size:,} bytes, too many for a tokenizer")
        try:
            pipeline = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except BaseException as failure:
            if not isinstance(failure, Exception) and type(failure).__name__ != "PanicException":
                raise
            raise UserError(f"{path} is not a tokenizer: {' '.join(str(failure).split())[:200]}") from None
        config = TokenizerConfig()
        beside = folder / "tokenizer_config.json"
        if beside.is_file():
            try:
                config = TokenizerConfig.model_validate(read_json(beside, TokenizerConfig))
            except UserError as wrong:
                raise UserError(f"{wrong} (copy the tokenizer again)") from None
        end = config.eos_token if isinstance(config.eos_token, str) else config.eos_token.content
        return cls(pipeline, kind=config.convergeflow.kind, end=end, capitals=config.convergeflow.capitals)


def stories_tokenizer() -> Tokenizer:
    """The words of the stories; id 0 ends a story, and ids are those of `stories_law()`."""
    words = {word: index for index, word in enumerate(stories_law().vocabulary)}
    pipeline = _word_pipeline(models.WordLevel(words))
    pipeline.add_special_tokens([AddedToken(END_TOKEN, special=True, normalized=False)])
    return Tokenizer(pipeline, kind="word", end=END_TOKEN, capitals=[*GIRLS.split(), *BOYS.split()])


def train_words(texts: Iterable[str], size: int) -> Tokenizer:
    """The `size` most frequent words and marks, in lower case; the rest becomes one unknown token."""
    pipeline = _word_pipeline(models.WordLevel({UNKNOWN: 1}, unk_token=UNKNOWN))
    trainer = trainers.WordLevelTrainer(vocab_size=size, special_tokens=[END_TOKEN, UNKNOWN], show_progress=False)
    pipeline.train_from_iterator(texts, trainer)
    return Tokenizer(pipeline, kind="word", end=END_TOKEN)


def _word_pipeline(model: models.Model) -> tokenizers.Tokenizer:
    pipeline = tokenizers.Tokenizer(model)
    pipeline.normalizer = normalizers.Lowercase()
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("isolated")]
    )
    pipeline.decoder = decoders.WordPiece(prefix="\x00", cleanup=True)  # words with spaces between, none before marks
    return pipeline


def train_words_and_bytes(texts: Iterable[str], size: int) -> Tokenizer:
    """The most frequent words, each with the space before it, and all bytes: a rare word is written as the longest
    known beginnings, down to bytes. Every text decodes to itself."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    counts = Counter(word for text in texts for word, _ in split.pre_tokenize_str(text))
    symbols = sorted(split.alphabet())
    _check_bytes_fit(size)
    # Equally frequent words in alphabetical order: the vocabulary is a function of the texts.
    ranked = sorted((word for word in counts if len(word) > 1), key=lambda word: (-counts[word], word))
    tokens = [END_TOKEN, *symbols, *ranked[: size - 1 - len(symbols)]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Longest match first; the unknown token must exist, and no text can reach it.
    model = models.WordPiece(
        vocabulary, unk_token=END_TOKEN, max_input_chars_per_word=1 << 30, continuing_subword_prefix=""
    )
    pipeline = _byte_pipeline(model)
    pipeline.add_special_tokens([AddedToken(END_TOKEN, special=True, normalized=False)])
    return Tokenizer(pipeline, kind="word-byte", end=END_TOKEN)


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """Byte-level BPE learned from texts: every text can be written with it, and decodes to itself."""
    _check_bytes_fit(size)
    pipeline = _byte_pipeline(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pipeline.train_from_iterator(texts, trainer)
    return Tokenizer(pipeline, kind="bpe", end=END_TOKEN)


def _check_bytes_fit(size: int) -> None:
    smallest = 256 + 1
    if size < smallest:
        raise UserError(f"a byte-level tokenizer needs at least {smallest} tokens (256 bytes and the end), not {size}")


def byte_tokenizer() -> Tokenizer:
    """A token per byte: the id is the byte's value, and 256 ends a document."""
    vocabulary = {symbol: byte for byte, symbol in _byte_symbols().items()}
    pipeline = _byte_pipeline(models.BPE(vocabulary, []))
    pipeline.add_special_tokens([AddedToken(END_TOKEN, special=True, normalized=False)])
    return Tokenizer(pipeline, kind="byte", end=END_TOKEN)


def gpt2_tokenizer(folder: str | Path | None = None) -> Tokenizer:
    """The tokenizer of GPT-2 (50257 tokens, `<|endoftext|>` = 50256) from `encoder.json` and `vocab.bpe`."""
    folder = Path(folder) if folder is not None else fetched("gpt2-bpe")
    vocabulary = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    lines = (folder / "vocab.bpe").read_text(encoding="utf-8").split("\n")
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines[1:] if line.strip())]
    pipeline = _byte_pipeline(models.BPE(vocabulary, merges))
    pipeline.add_special_tokens([AddedToken(GPT2_END, special=True, normalized=False)])
    return Tokenizer(pipeline, kind="gpt2", end=GPT2_END)


def _byte_pipeline(model: models.Model) -> tokenizers.Tokenizer:
    pipeline = tokenizers.Tokenizer(model)
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    return pipeline


def _byte_symbols() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies.

    Printable bytes stand for themselves; the others get the characters from 256 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in symbols:
            symbols[byte] = chr(256 + len(symbols) - len(printable))
    return symbols


def build(kind: str, texts: Iterator[str], size: int | None, default_size: int) -> Tokenizer:
    """The tokenizer a user names: one of KINDS, or a folder that holds one. `texts` are read only to learn from."""
    if size is not None and size > MOST_TOKENS:
        raise UserError(f"a vocabulary has at most {MOST_TOKENS:,} tokens here, not {size:,}")
    if kind == "word":
        return train_words(texts, size or default_size)
    if kind == "word-byte":
        return train_words_and_bytes(texts, size or default_size)
    if kind == "bpe":
        return train_bpe(texts, size or default_size)
    if kind == "byte":
        made = byte_tokenizer()
    elif kind == "gpt2":
        made = gpt2_tokenizer()
    elif (Path(kind) / "tokenizer.json").is_file():
        made = Tokenizer.load(kind)
    else:
        raise unknown_name("tokenizer", kind, KINDS)
    if size is not None and size != made.size:
        raise UserError(f"the {kind} tokenizer has {made.size} tokens, not {size}; leave the vocabulary out")
    return made
