"""A worker that is forked from the template process, as its actor sees it."""

from __future__ import annotations

import asyncio
import builtins
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvrelay import errors
from kvrelay.config.schema import ClusterConfig
from kvrelay.types.control_plane import Claim
from kvrelay.worker.runtime.settings import WorkerSettings

# Largest length of the line that tells how a worker ended, in bytes.
_MOST_LINE = 2**20


def settings_to_json(settings: WorkerSettings) -> dict[str, Any]:
    """Returns the settings as plain data for JSON, for `settings_from_json`."""
    values = {name: getattr(settings, name) for name in settings.__slots__}
    claim = None if settings.claim is None else asdict(settings.claim)
    return {**values, "config": settings.config.model_dump(mode="json"), "claim": claim}


def settings_from_json(values: dict[str, Any]) -> WorkerSettings:
    """Reads the settings that `settings_to_json` wrote."""
    claim = None if values["claim"] is None else Claim(**values["claim"])
    return WorkerSettings(
        **{**values, "config": ClusterConfig.model_validate(values["config"]), "claim": claim}
    )


def _error(name: str, message: str) -> Exception:
    """Rebuilds the error that ended a worker: kvrelay's and Python's own errors by their type,
    others as Unavailable.
    """
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:
            # The constructor needs more than a message.
            return RuntimeError(f"{name}: {message}")
    return errors.Unavailable(f"{name}: {message}")


class ForkedWorker:
    """A worker that was requested from the template, as seen by its actor. Belongs to one event
    loop.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def ask(
        cls, path: str, settings: WorkerSettings, variables: Mapping[str, str]
    ) -> ForkedWorker:
        """Requests a worker from the template at `path`. Raises OSError if there is no template."""
        worker = cls(*await asyncio.open_unix_connection(path, limit=_MOST_LINE))
        worker.tell(settings=settings_to_json(settings), variables=dict(variables))
        return worker

    def tell(self, **order: object) -> None:
        """Sends an order, for example drain=True or turn="decode"."""
        self._writer.write(json.dumps(order).encode() + b"\n")

    async def started(self) -> bool:
        """Waits until the worker's process runs. Returns False if the template ended before."""
        try:
            return bool(await self._reader.readline())
        except ConnectionError:
            return False

    async def ended(self) -> None:
        """Waits until the worker has ended. Raises the error that ended the worker, or Unavailable
        if its process died.
        """
        try:
            line = await self._reader.readline()
        except ConnectionError:
            line = b""
        self._writer.close()
        if not line:
            raise errors.Unavailable("the worker process ended")
        result = json.loads(line)
        if result["error"]:
            raise _error(result["error"], result["message"])
