"""Continuous flow language models whose samples converge to token embeddings.

Importing the package is cheap: the heavy rooms are loaded when they are first used.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("convergeflow")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0+source"
