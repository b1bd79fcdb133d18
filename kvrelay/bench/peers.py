"""The engines that kvrelay's engine is compared with."""

from __future__ import annotations

import os
import shutil
import sys

from kvrelay.bench.engine_process import vllm_command
from kvrelay.errors import InvalidArgument

GENERATE_BATCH = (sys.executable, "-m", "kvrelay.bench.engines.generate_batch_engine")


def peer_command(peer: str, *, has_checkpoint: bool) -> tuple[str, ...]:
    """Returns the command that runs the peer. Raises InvalidArgument for an unknown peer, and for a
    peer that cannot run the model.
    """
    name, _, path = peer.partition("=")
    if peer == "generate_batch":
        return GENERATE_BATCH
    if name != "vllm" or not path:
        raise InvalidArgument(
            f"--peer {peer!r} is unknown; allowed are generate_batch, and vllm=PYTHON with the "
            "Python of an environment that has vLLM",
            field="peer",
        )
    if (python := shutil.which(path)) is None:
        raise InvalidArgument(
            f"--peer vllm={path:.200}: there is no such program; give the Python of an environment "
            "that has vLLM",
            field="peer",
        )
    if not has_checkpoint:
        raise InvalidArgument(
            "--peer vllm needs a checkpoint; give --model instead of --model-shape, or "
            "compare with generate_batch",
            field="peer",
        )
    return vllm_command(os.path.abspath(python))
