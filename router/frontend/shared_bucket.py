"""A rate limit that the processes of one router share."""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvrelay.process.telemetry import get_logger
from router.frontend.rate_limits import Bucket

# Level, time of the level, allowance of a minute.
_STATE = struct.Struct("<ddq")

# Time in which a process gets the lock, in seconds. The event loop waits for it.
_LOCK_S = 0.002
_PAUSE_S = 5e-5
# Time in which a process that did not get the lock does not wait for it again, in seconds.
_NO_WAIT_S = 0.1

log = get_logger("router.limits")


def shared_bucket(
    folder: Path, tenant: str, what: str, per_minute: int, now: float
) -> SharedBucket:
    """Makes the bucket of a tenant's limit for the processes that share the folder."""
    name = hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()
    return SharedBucket(folder / f"{name}.{what}", per_minute, now)


class SharedBucket(Bucket):
    """A bucket whose state is in a file. The processes have the same clock and lock the file for
    some microseconds. A process that ends leaves the lock to the others.

    Without space for the file, each process counts for itself. While another process does not
    release the lock, a process counts for itself, and adds that when it has the lock again. The
    tenant then owes at most the limit of a minute.
    """

    def __init__(self, path: Path, per_minute: int, now: float) -> None:
        """The first process makes the file."""
        super().__init__(per_minute, now)
        # None after an error of the file system.
        self._path: Path | None = path
        # Tokens that were taken, less those given back, without the lock.
        self._owed = 0
        # Until then, the process does not wait for the lock.
        self._no_wait_until = 0.0
        self.resize(per_minute, now)

    def take(self, amount: int, now: float) -> float:
        """See Bucket."""
        with self._state() as is_shared:
            wait = super().take(amount, now)
            if not (wait or is_shared):
                self._owed += amount
            return wait

    def wait(self, amount: int, now: float) -> float:
        """See Bucket."""
        with self._state():
            return super().wait(amount, now)

    def give_back(self, amount: int) -> None:
        """See Bucket."""
        with self._state() as is_shared:
            super().give_back(amount)
            if not is_shared:
                self._owed -= amount

    def resize(self, per_minute: int, now: float) -> None:
        """Changes the allowance. A larger one adds nothing at once: while some processes have not
        read a new tokens file yet, the allowance may change many times.
        """
        with self._state():
            self._refill(now)
            self._level = min(self._level, per_minute)
            self.per_minute = per_minute

    @contextmanager
    def _state(self) -> Iterator[bool]:
        """Yields whether the state is that of all processes."""
        file = self._opened()
        try:
            yield file is not None
            if file is not None:
                os.pwrite(file, _STATE.pack(self._level, self._at, self.per_minute), 0)
        except OSError as error:
            self._no_longer(error)
        finally:
            if file is not None:
                os.close(file)

    def _opened(self) -> int | None:
        """Opens, locks and reads the file."""
        if self._path is None:
            return None
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._no_longer(error)
            return None
        try:
            if self._locked(file):
                if len(state := os.pread(file, _STATE.size, 0)) == _STATE.size:
                    self._level, self._at, self.per_minute = _STATE.unpack(state)
                    level = min(self._level - self._owed, self.per_minute)
                    # What the others took is bounded, not what they owe already.
                    self._level = max(level, min(self._level, -self.per_minute))
                self._owed = 0
                return file
        except OSError as error:
            self._no_longer(error)
        os.close(file)
        return None

    def _locked(self, file: int) -> bool:
        """Locks the file. Returns False if another process does not release it. Raises OSError."""
        until = time.perf_counter() + _LOCK_S
        while not _try_lock(file):
            now = time.perf_counter()
            if now < self._no_wait_until:
                return False
            if now > until:
                self._no_wait_until = now + _NO_WAIT_S
                return False
            # The process that has the lock may wait for this core.
            time.sleep(_PAUSE_S)
        self._no_wait_until = 0.0
        return True

    def _no_longer(self, error: OSError) -> None:
        log.warning("limit_not_shared", file=str(self._path), reason=error.strerror)
        self._path = None


def _try_lock(file: int) -> bool:
    """Locks the file unless another process has the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
