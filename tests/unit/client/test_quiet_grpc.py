"""An error of the SDK has no lines of gRPC's C++ library around it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.scripted_router import ScriptedRouter, serving

CODE = """
import os, sys
import kvrelay
client = kvrelay.Client(sys.argv[1], tls=True, timeout=5)
try:
    client.models()
except kvrelay.Unavailable as error:
    print(error)
print(os.environ.get("GRPC_VERBOSITY"))
"""


@pytest.mark.parametrize("level", [None, "INFO"])
def test_a_failed_handshake_is_one_error(level: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    if level is not None:
        environment["GRPC_VERBOSITY"] = level
    with serving(ScriptedRouter()) as target:
        found = subprocess.run(
            [sys.executable, "-c", CODE, target], env=environment, capture_output=True, text=True
        )
    assert "The server speaks no TLS" in found.stdout
    assert found.stdout.splitlines()[-1] == str(level), "the environment is as it was"
    assert ("Handshake failed" in found.stderr) is (level == "INFO")
