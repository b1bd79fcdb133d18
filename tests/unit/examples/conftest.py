from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def environment() -> Iterator[dict[str, str]]:
    """What the examples need to find a cluster, which runs as long as they do."""
    command = [sys.executable, "-m", "kvrelay.cli.main", "serve", "--log-level", "error"]
    ports = ["--grpc-port", "0", "--http-port", "0", "--admin-port", "0"]
    with subprocess.Popen(
        [*command, *ports], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as serve:
        try:
            assert serve.stdout is not None
            words = dict(word.split("=", 1) for word in serve.stdout.readline().split()[2:])
            yield os.environ | {"KVRELAY_TARGET": words["grpc"], "KVRELAY_HTTP": words["http"]}
        finally:
            serve.send_signal(signal.SIGTERM)
            try:
                serve.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(serve.pid, signal.SIGKILL)
