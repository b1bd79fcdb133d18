"""The program of the ranks from 1 on: `python -m kvrelay.engine.parallel.rank RANK DEGREE PORT`.
RankGroup starts it.

A rank computes the steps that rank 0 sends until rank 0 ends it. Any error ends the process, which
rank 0 detects.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from transformers.utils.logging import disable_progress_bar

from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.forward.torch_forward import TorchForward
from kvrelay.engine.model.loader import load_model
from kvrelay.engine.parallel import channel, gpu_shares
from kvrelay.engine.parallel.settings import RankSettings
from kvrelay.engine.parallel.step_message import step_from_numbers
from kvrelay.process.telemetry import configure_logging


def main() -> None:
    """Reads the settings from stdin, then serves as a rank. Returns at the end of stdin."""
    rank, degree, port = map(int, sys.argv[1:])
    # A signal to the whole process group lets rank 0 drain first. Rank 0 then ends this process.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    configure_logging()
    disable_progress_bar()
    line = sys.stdin.readline()
    if not line:
        # The model was refused before any weights were loaded.
        return
    run(RankSettings.from_json(line), rank, degree, port)


@torch.inference_mode()
def run(settings: RankSettings, rank: int, degree: int, port: int) -> None:
    """Loads this rank's share of the model, then computes each step that rank 0 sends. Never
    returns.
    """
    torch.set_num_threads(settings.threads)
    channel.join(rank, degree, port, settings.device)
    # Rank 0 has the model's id. Hashing all weights again on each rank would only take time.
    loaded = load_model(
        settings.model_path,
        dtype=settings.dtype,
        device=settings.device,
        ranks=degree,
        identify=False,
    )
    layout = loaded.layout(settings.block_size, settings.kv_dtype)
    num_blocks, fd = channel.hear().tolist()
    if settings.device == "cpu":
        kv = KvPool(layout, num_blocks, rank=rank, of_rank_0=f"/proc/{os.getppid()}/fd/{fd}")
    else:
        kv = KvPool(layout, num_blocks, str(loaded.model.device), rank=rank)
        gpu_shares.exchange(kv.buffer)
    forward = TorchForward(loaded.model, kv)
    while True:
        forward(step_from_numbers(channel.hear()))


if __name__ == "__main__":
    main()
