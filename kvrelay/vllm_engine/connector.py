"""The hand-off under vLLM: a KV connector that moves blocks between vLLM's memory and the staging
memory. `kv_transfer` moves them between workers.

    prefill worker: vLLM's blocks ──save, after each step──▶ staging blocks ──push──▶
    decode worker:  ──commit──▶ staging blocks ──load, before the first step──▶ vLLM's blocks

vLLM constructs two connectors in the worker's process, one for its scheduler and one for its model.
Both run in the engine's thread, within `VllmEngine.step`. A copy is complete when the step ends, so
vLLM frees blocks as always, and staging blocks are held by kvrelay's leases and pushes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvrelay.vllm_engine.exchange import EXCHANGE, Exchanged


@dataclass(frozen=True, slots=True)
class Copy:
    """Blocks of vLLM, and the staging blocks of the same tokens."""

    one: Exchanged
    blocks: tuple[int, ...]
    staging: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepCopies(KVConnectorMetadata):  # type: ignore[misc]
    """The copies of one step."""

    loads: tuple[Copy, ...]
    saves: tuple[Copy, ...]


class HandoffConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads the KV that arrived for a sequence, and saves the KV of prompts that leave."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size: int = vllm_config.cache_config.block_size
        # vLLM's requests by vLLM's id.
        self._requests: dict[str, Any] = {}
        self._loads: list[Copy] = []

    @property
    def requires_kv_delivery(self) -> bool:
        """False: saved KV does not depend on vLLM's blocks, and a preempted prompt is saved on."""
        return False

    # In vLLM's scheduler

    def on_new_request(self, request: Any) -> None:
        """Remembers the request until it has finished."""
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The tokens whose KV has arrived, beyond those in vLLM's prefix cache."""
        one = _exchanged(request)
        return max(0, (one.arrived_tokens if one else 0) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Schedules the load of KV that has arrived."""
        one = _exchanged(request)
        if one is None or not num_external_tokens:
            return
        first = (one.arrived_tokens - num_external_tokens) // self._block_size
        end = self._blocks_for(one.arrived_tokens)
        own = blocks.get_block_ids()[0][first:end]
        self._loads.append(Copy(one, tuple(own), tuple(one.sequence.blocks[first:end])))

    def build_connector_meta(self, scheduler_output: Any) -> StepCopies:
        """The copies of the step that vLLM has scheduled."""
        saves = [
            copy
            for request_id, tokens in scheduler_output.num_scheduled_tokens.items()
            if (copy := self._save(self._requests.get(request_id), tokens)) is not None
        ]
        loads, self._loads = self._loads, []
        return StepCopies(tuple(loads), tuple(saves))

    def _save(self, request: Any, tokens: int) -> Copy | None:
        """The blocks of a leaving prompt that a step of `tokens` of its tokens completes."""
        one = None if request is None else _exchanged(request)
        if one is None or not one.leaves:
            return None
        length, end = request.num_prompt_tokens, request.num_computed_tokens + tokens
        full = self._blocks_for(length) if end >= length else end // self._block_size
        first = one.staged_blocks
        if full <= first:
            return None
        (own,) = self._kv_cache_manager.get_block_ids(request.request_id)
        return Copy(one, tuple(own[first:full]), tuple(one.sequence.blocks[first:full]))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forgets the request. Its blocks are free: what leaves was copied."""
        self._requests.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Like `request_finished`."""
        return self.request_finished(request, [])

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    # In vLLM's model runner

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes vLLM's KV memory."""
        EXCHANGE.kv_caches = dict(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads, before the step's forward pass."""
        for copy in self._copies().loads:
            assert EXCHANGE.copier is not None, "KV arrives after the start"
            EXCHANGE.copier.load(copy.blocks, copy.staging)
            copy.one.arrived_tokens = 0

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Returns at once: all layers are loaded before the forward pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Does nothing: all layers are saved after the forward pass."""

    def wait_for_save(self) -> None:
        """Saves, after the step's forward pass."""
        for copy in self._copies().saves:
            assert EXCHANGE.copier is not None, "prompts leave after the start"
            EXCHANGE.copier.save(copy.blocks, copy.staging)
            copy.one.staged_blocks += len(copy.blocks)

    def _copies(self) -> StepCopies:
        copies = self._get_connector_metadata()
        assert isinstance(copies, StepCopies), "the metadata is this connector's"
        return copies


def _exchanged(request: Any) -> Exchanged | None:
    params = request.sampling_params
    return None if params is None else EXCHANGE.of(params.extra_args)
