from __future__ import annotations

import sys
from pathlib import Path

# The ten sentences are shared by several files.
sys.path.insert(0, str(Path(__file__).parent))
