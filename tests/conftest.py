"""What all tests share: helper modules beside them can be imported, and nothing talks to a network."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("CONVERGEFLOW_QUIET", None)  # some tests read what commands say on stderr
