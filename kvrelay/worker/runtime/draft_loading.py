"""Loads the draft model of a decode worker."""

from __future__ import annotations

import asyncio
import time

import torch

from kvrelay.config.pools import SpeculationConfig
from kvrelay.engine.model.loader import LoadedModel, load_model
from kvrelay.engine.runner import ModelRunner
from kvrelay.errors import ModelRefused
from kvrelay.models import resolve_model
from kvrelay.process.telemetry import get_logger
from kvrelay.types.kv_layout import KvLayout
from kvrelay.worker.runtime.draft_files import check_draft_files, check_memory, check_vocabulary
from kvrelay.worker.runtime.settings import WorkerSettings

# Seconds in which the worker prepares the draft model's steps before it serves.
_CAPTURE_S = 0.5

log = get_logger("worker")


async def load_draft(settings: WorkerSettings, runner: ModelRunner) -> ModelRunner | None:
    """Loads the draft model onto the device of the decode pool, off the event loop, with KV memory
    of its own. Returns None if the worker needs none. runner: of the served model.

    Raises ConfigError, ModelRefused.
    """
    draft = settings.config.decode.draft
    if draft is None or settings.pool != "decode":
        return None
    began = time.monotonic()
    loaded = await asyncio.to_thread(_load, settings, draft, runner)
    log.info(
        "draft_model_loaded",
        worker=settings.worker_id,
        model=draft.model,
        engine=loaded.engine,
        weight_bytes=loaded.weight_bytes,
        kv_bytes=loaded.kv_bytes,
        kv_tokens=loaded.num_blocks * loaded.layout.block_size,
        seconds=round(time.monotonic() - began, 3),
    )
    return loaded


def _load(settings: WorkerSettings, draft: SpeculationConfig, runner: ModelRunner) -> ModelRunner:
    config = settings.config
    assert draft.model is not None, "kind draft has a model"
    check_draft_files(config, settings.model_path)
    path = resolve_model(draft.model)
    # OpenMP keeps this number per calling thread.
    torch.set_num_threads(config.decode.threads)
    device = "cuda" if config.decode.resources.num_gpus else "cpu"
    try:
        loaded = load_model(path, dtype=config.model.dtype, device=device, identify=False)
    except ModelRefused as error:
        raise ModelRefused(f"decode.speculation.model: {error.message}") from error
    check_vocabulary(
        draft.model,
        (loaded.vocab_size, loaded.tokenizer_id),
        (runner.vocab_size, runner.tokenizer_id),
    )

    def checked(_: LoadedModel, layout: KvLayout, longest: int) -> int:
        check_memory(draft.memory, layout.blocks_for(longest) * layout.block_bytes, longest)
        return draft.memory

    drafting = ModelRunner.of(
        loaded,
        block_size=runner.layout.block_size,
        kv_bytes=checked,
        max_model_len=runner.max_model_len,
        weights=config.decode.weights,
    )
    drafting.capture_decode_steps(min(draft.max_batch, config.decode.max_batch), _CAPTURE_S)
    return drafting
