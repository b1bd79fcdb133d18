"""The hand-off by vLLM's own NixlConnector: a decode worker's vLLM reads blocks from the memory of
a prefill worker's vLLM. kvrelay carries vLLM's parameters for that in the commit of a push.

    prefill worker: the prompt ends, and vLLM holds its blocks ──commit: where they are──▶
    decode worker:  vLLM allocates blocks, reads, and tells the other vLLM ──▶ blocks are free

The differences from vLLM's connector:
- The prefill worker's token is the last one of the decode worker's prompt, and its KV is computed.
- Blocks have a time until which they stay unchanged. A read that ends later has failed.
- kvrelay can release blocks that nobody will read.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id

from kvrelay.vllm_engine.exchange import EXCHANGE
from kvrelay.vllm_engine.nixl.remote_reads import MARGIN_S, RemoteRead
from kvrelay.vllm_engine.nixl.threads import resting_threads


class NixlHandoffConnector(NixlConnector):  # type: ignore[misc]
    """vLLM's NixlConnector with the two halves below."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        arguments = (vllm_config, self.engine_id, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = HandoffScheduler(*arguments)
            return
        with resting_threads():
            self.connector_worker = HandoffWorker(*arguments)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers vLLM's KV memory with NIXL."""
        EXCHANGE.kv_caches = dict(kv_caches)
        super().register_kv_caches(kv_caches)


class HandoffScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """The half in vLLM's scheduler."""

    def _get_remote_prefill_token_count(self, num_prompt_tokens: int) -> int:
        # The last token is the one that the prefill worker sampled.
        return num_prompt_tokens - 1

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The tokens to read, beyond those in vLLM's prefix cache: none if the blocks may have
        changed while the sequence waited for room.
        """
        read = _read(request.request_id)
        if read is not None and time.monotonic() >= read.deadline and _is_due(request):
            read.failed = True
            self._decline(request)
            return 0, False
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return found

    def _decline(self, request: Any) -> None:
        """Tells the other vLLM that nobody will read the blocks. vLLM does the same for a request
        that it has not scheduled.
        """
        self._stop_heartbeat(request.request_id)
        request.kv_transfer_params["do_remote_prefill"] = False
        self._reqs_need_recv[request.request_id] = (request, [], (), False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Schedules the read."""
        read = _read(request.request_id)
        if read is not None and num_external_tokens:
            read.tokens = num_external_tokens
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Adds until when the blocks of a prompt are held."""
        held, params = super().request_finished(request, block_ids)
        if held and params is not None:
            params["remote_blocks_expiry_time"] = self._reqs_need_send[request.request_id]
        return held, params

    def shutdown(self) -> None:
        """Ends the thread that answers handshakes, without the second that it may take."""
        self._stop_event.set()
        self._nixl_handshake_listener_t = None


class HandoffWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """The half in vLLM's model runner."""

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done, failed = super()._pop_done_transfers(transfers)
        for request_id in done - failed:
            if self._ended_late(request_id):
                failed.add(request_id)
        return done, failed

    def _ended_late(self, request_id: str) -> bool:
        """Whether the blocks that were read may have changed meanwhile: by the time since the
        commit, or by the sender's clock as vLLM's handshake has compared it.
        """
        read = _read(request_id)
        if read is None or not read.tokens:
            return False
        offset = self._engine_clock_offset.get(read.blocks.engine_id, math.inf)
        expires_at = read.blocks.expires_at - offset - MARGIN_S
        return time.monotonic() >= read.deadline or time.perf_counter() >= expires_at

    def get_transfer_results(self) -> Any:
        """Notes which reads have failed."""
        results = super().get_transfer_results()
        for request_id in results.failed_recving:
            if (read := _read(request_id)) is not None:
                read.failed = True
        return results

    def _get_new_notifs(self) -> set[str]:
        """The requests whose blocks were read, and those that kvrelay releases."""
        found: set[str] = super()._get_new_notifs()
        while EXCHANGE.released:
            request_id = EXCHANGE.released.popleft()
            if self._reqs_to_send.pop(request_id, None) is not None:
                self._reqs_to_process.discard(request_id)
                found.add(request_id)
        return found


def _is_due(request: Any) -> bool:
    """Whether vLLM has neither begun nor declined the request's read."""
    return bool(request.kv_transfer_params and request.kv_transfer_params["do_remote_prefill"])


def _read(request_id: str) -> RemoteRead | None:
    """The read of one of vLLM's requests, whose id is a sequence's name with a suffix."""
    one = EXCHANGE.sequences.get(get_base_request_id(request_id))
    return None if one is None else one.read
