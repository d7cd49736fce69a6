"""`python -m convergeflow` is the command line."""

from __future__ import annotations

import sys

from convergeflow.cli.main import main

sys.exit(main())
