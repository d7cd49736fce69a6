"""A corpus: a child counts. Documents with a split each; packing, tokenizer and cache are the package's."""

from convergeflow.data.sources import Document

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


class Counting:
    """Counts from every word to every later one, again and again."""

    name = "counting"

    def __init__(self, limit):
        self.limit = limit

    def key(self):
        """What decides the documents: part of the name of the cached corpus."""
        return {"version": 1, "limit": self.limit}

    def survey(self, progress):
        """A look at everything before reading, for hashes and splits; there is nothing to look at here."""

    def documents(self):
        """All documents in order; those of the split `heldout` are never trained on."""
        spans = [(first, last) for first in range(10) for last in range(first + 1, 10)] * 20
        for number, (first, last) in enumerate(spans[: self.limit]):
            text = ", ".join(WORDS[first : last + 1]).capitalize() + "."
            yield Document(text, "heldout" if number % 10 == 0 else "train")

    def describe(self):
        """For the corpus's manifest."""
        return {"kind": "generated", "documents": self.limit or 900}

    def split_rule(self):
        return "every tenth document"


def counting(*, limit=None):
    """What the entry point names: a function of `limit`, the most documents to use."""
    return Counting(limit)
