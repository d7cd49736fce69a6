from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

# Processes started by these tests import the toy by name.
sys.path.insert(0, str(Path(__file__).parent))

# Children are forked from a server that has the heavy imports behind it: killing and resuming is then a matter of
# milliseconds, not of loading torch again each time.
multiprocessing.get_context("forkserver").set_forkserver_preload(["convergeflow.training.trainer"])
