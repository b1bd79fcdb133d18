"""The download of a hub model into this host's cache, before any worker starts."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from kvrelay.errors import ConfigError, Unavailable
from kvrelay.models.hub import MissingFiles
from kvrelay.process.child import bound_to_parent, stop
from kvrelay.process.telemetry import get_logger

_STOP_S = 5.0
_LOG_EVERY_S = 30.0

log = get_logger("launch")


class ModelDownload:
    """Async context manager that downloads a model in a child process. Leaving it ends the process;
    complete files stay in the cache, and the next download continues after them.
    """

    def __init__(self, model: str, log_file: Path | None = None) -> None:
        """`log_file` takes what the hub's library reports, instead of this process's stderr."""
        self.model = model
        self._log_file = log_file
        # Bytes to download; 0 until the hub has answered.
        self.total_bytes = 0
        self.is_complete = False
        self._cache = Path()
        self._before = 0
        self._since = time.monotonic()
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> ModelDownload:
        with self._log_file.open("ab") if self._log_file else nullcontext() as log_file:
            self._process = await asyncio.create_subprocess_exec(
                *bound_to_parent(sys.executable, "-m", "kvrelay.models.hub", self.model),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log_file,
                # Ctrl-C must reach only this process.
                start_new_session=True,
            )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            await stop(self._process, _STOP_S)

    async def complete(self) -> None:
        """Returns when all files are in the cache. Raises ConfigError if the hub cannot provide the
        model, and Unavailable if the disk has no room for it.
        """
        missing = MissingFiles(**await self._answer())
        self._cache = Path(missing.folder)
        self._check_room(missing.num_bytes)
        self._before, self._since = _used_bytes(self._blobs), time.monotonic()
        self.total_bytes = missing.num_bytes
        if self.total_bytes:
            log.info("model_downloading", model=self.model, total_bytes=self.total_bytes)
        told = asyncio.create_task(self._tell())
        try:
            await self._answer()
        finally:
            told.cancel()
        self.is_complete = True
        if self.total_bytes:
            log.info("model_downloaded", model=self.model, seconds=round(self.elapsed_s, 1))

    @property
    def done_bytes(self) -> int:
        """Bytes downloaded so far. Reads the folder of the cache."""
        return min(max(0, _used_bytes(self._blobs) - self._before), self.total_bytes)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the download has begun."""
        return time.monotonic() - self._since

    @property
    def _blobs(self) -> Path:
        return self._cache / f"models--{self.model.replace('/', '--')}" / "blobs"

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_LOG_EVERY_S)
            log.info(
                "model_downloading",
                model=self.model,
                bytes=await asyncio.to_thread(lambda: self.done_bytes),
                total_bytes=self.total_bytes,
            )

    async def _answer(self) -> dict[str, Any]:
        """Returns the next object that the process prints. Raises its error."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            code = await self._process.wait()
            raise Unavailable(f"the download of {self.model} ended with exit code {code}")
        answer = json.loads(line)
        if "error" in answer:
            raise ConfigError(f"model.path: {answer['error']}")
        return dict(answer)

    def _check_room(self, wanted: int) -> None:
        existing = next(one for one in (self._cache, *self._cache.parents) if one.is_dir())
        free = shutil.disk_usage(existing).free
        if wanted > free:
            raise Unavailable(
                f"{self._cache} has no room for {self.model}: the download takes "
                f"{wanted / 2**30:.3g} GiB and {free / 2**30:.3g} GiB are free; free disk space "
                "there, or set HF_HOME to a folder on another disk"
            )


def _used_bytes(folder: Path) -> int:
    """Returns the size of the folder's files; parts of a file count."""
    total = 0
    for file in folder.glob("*"):
        try:
            total += file.stat().st_size
        except OSError:
            # Renamed since it was listed.
            continue
    return total
