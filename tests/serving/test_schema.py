"""schemathesis attacks the server by its own description: no answer is outside it, and nothing breaks inside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from served import running

pytestmark = pytest.mark.slow

LIMITS = ("calls=24", "samples=2", "length=32", "queue=64")
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method"
)
"""Not `positive_data_acceptance`: a body can fit its schema and still ask for what cannot be; it is told so by 400."""


def test_every_answer_is_as_described(models: list[str], tmp_path: Path) -> None:
    words = [word for limit in LIMITS for word in ("--limit", limit)]
    with running(*models, *words) as server:
        attack = [f"{server.url}/openapi.json", "--checks", CHECKS, "--max-examples", "30", "--seed", "1"]
        tuned = ["--no-shrink", "--request-timeout", "60", "--max-time", "40", "--warnings", "off"]
        command = [str(Path(sys.executable).parent / "schemathesis"), "run", *attack, *tuned]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-6000:]
        # Still there, and nothing in its log broke inside.
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        assert not any("Traceback" in line for line in server.lines)
        assert not [line for line in server.log if line.get("status") == 500]
        assert len(server.log) > 100
