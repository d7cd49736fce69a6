"""A scorer: how many nats zlib needs for a text. It knows no language, but it knows repetition when it sees it."""

import math
import zlib

import numpy as np

from convergeflow.evaluation.scorers import Scored


class ZipScorer:
    name = "zip"

    def __init__(self, device, batch, say):
        """A scorer is made with a device, a batch size and a function that tells the user of slow first times."""

    def score(self, texts, protocol, progress=lambda done: None):
        """Nats and tokens of each sample; `texts` has `ids` [n, length] and `documents`, the texts between ends."""
        nats = [8 * math.log(2) * len(zlib.compress("\n".join(each).encode(), 9)) for each in texts.documents]
        progress(len(nats))
        return Scored(np.array(nats), np.full(len(nats), texts.ids.shape[1]))

    def describe(self):
        """What tells this scorer's numbers from others: part of every record."""
        return {"name": self.name, "level": 9}

    def arithmetic(self, protocol):
        return "float64"
