"""A worker's entry in the registry."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvrelay.errors import KvRelayError, Unavailable
from kvrelay.process.telemetry import get_logger
from kvrelay.security.credentials import Credentials
from kvrelay.security.guard import RoleGuard
from kvrelay.state.registry import Registry
from kvrelay.worker.worker import Worker

HEARTBEAT_S = 0.5
TTL_S = 3.0

log = get_logger("worker")


async def publish_heartbeats(
    worker: Worker, registry: Registry, credentials: Credentials | None, guard: RoleGuard | None
) -> None:
    """Publishes the worker's state, at once when it changes. An unreachable registry costs
    visibility, not streams.
    """
    away, told = False, ""
    while True:
        worker.state_changed.clear()
        if credentials is not None and guard is not None:
            worker.heartbeat.certificate_note = credentials.trouble()
            guard.tell_of_ended()
        try:
            info = worker.info()
            await registry.publish_worker(info, TTL_S)
            if info.state != told:
                await registry.announce_change()
                told = info.state
            if away:
                log.info("registry_available", worker=worker.context.identity.worker_id)
            away = False
        except Unavailable as error:
            if not away:
                log.warning(
                    "registry_unavailable",
                    worker=worker.context.identity.worker_id,
                    reason=error.message,
                )
            away = True
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                await worker.state_changed.wait()


async def sign_off(worker: Worker, registry: Registry) -> None:
    """Removes the worker's entry from the registry. The entry of a hung worker stays until its TTL,
    with the state stuck.
    """
    try:
        if worker.context.engine.hung:
            await registry.publish_worker(worker.info(), TTL_S)
        else:
            await registry.remove_worker(
                worker.context.identity.worker_id, worker.context.identity.epoch
            )
    except KvRelayError as error:
        log.warning(
            "registry_sign_off_failed",
            worker=worker.context.identity.worker_id,
            reason=error.message,
        )
