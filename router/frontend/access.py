"""Who may come in: bearer tokens to tenants, from a file that is read again when it changes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvrelay.config.tokens_file import load_tokens
from kvrelay.errors import ConfigError, PermissionDenied, Unauthenticated
from kvrelay.process.telemetry import get_logger
from kvrelay.tenants import ANONYMOUS, Role, Tenant

POLL_S = 1.0  # after which a token that was taken out of the file lets nobody in any more
MAX_TOKEN = 512  # characters

log = get_logger("router.access")


class Access:
    """Without a tokens file everybody is ANONYMOUS and may do all; configurations allow that on
    loopback only.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError for a file that cannot be used: a router does not start without one
        that it can.
        """
        self._path = path
        self._seen = _signature(path)
        self._tenants: Mapping[bytes, Tenant] = {} if path is None else load_tokens(path)
        # Its own, so that a token which is taken out is refused in time, whatever clients keep
        # other threads busy with.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokens file")
        self.failed_loads = 0
        self.refusals = 0  # of callers without a token that is known here

    @property
    def open(self) -> bool:
        """Whether nobody needs a token."""
        return self._path is None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tenant.name for tenant in self._tenants.values())

    def admit(self, authorization: Sequence[str], roles: frozenset[Role]) -> Tenant:
        """The tenant of `Bearer TOKEN`, which has to have one of the roles; `authorization` are all
        such headers.

        Raises Unauthenticated, PermissionDenied.
        """
        if self.open:
            return ANONYMOUS
        tenant = self._tenant(authorization)
        check_role(tenant, roles)
        return tenant

    async def watch(self, changed: Callable[[], None]) -> None:
        """Until cancelled. `changed` is called when other tenants have come into force.

        It also tells the log of callers that were refused, in one line however many they are.
        """
        told = 0
        while True:
            await asyncio.sleep(POLL_S)
            if await self.reload():
                changed()
            if self.refusals > told:
                log.warning("unknown_tokens_refused", number=self.refusals - told)
                told = self.refusals

    async def reload(self) -> bool:
        """Reads the file if it has changed; what cannot be used leaves all as it was, and is in the
        log.
        """
        if self._path is None:
            return False
        loop = asyncio.get_running_loop()
        signature = await loop.run_in_executor(self._thread, _signature, self._path)
        if signature == self._seen:
            return False
        self._seen = signature
        try:
            self._tenants = await loop.run_in_executor(self._thread, load_tokens, self._path)
        except ConfigError as error:
            self.failed_loads += 1
            log.error("tokens_file_rejected", reason=error.message)
            return False
        log.info("tokens_file_loaded", tenants=len(self.names), tokens=len(self._tenants))
        return True

    def _tenant(self, authorization: Sequence[str]) -> Tenant:
        if not authorization:
            self.refusals += 1
            raise Unauthenticated(
                "this cluster needs a token; send the header `authorization: Bearer TOKEN`"
            )
        scheme, _, token = authorization[0].partition(" ")
        if len(authorization) > 1 or scheme.lower() != "bearer" or not 0 < len(token) <= MAX_TOKEN:
            self.refusals += 1
            raise Unauthenticated("the header authorization is not one `Bearer TOKEN`")
        # What is looked up is the hash of what came. How far that agrees with a hash which is known
        # tells nothing of a token that would agree further, so the time that this takes helps
        # nobody to guess one.
        tenant = self._tenants.get(hashlib.sha256(token.encode(errors="replace")).digest())
        if tenant is None:
            self.refusals += 1
            raise Unauthenticated("this token is not known here; it may have been withdrawn")
        return tenant


def check_role(tenant: Tenant, roles: frozenset[Role]) -> None:
    """Raises PermissionDenied."""
    if not tenant.roles & roles:
        raise PermissionDenied(
            f"tenant {tenant.name} has the role {_listed(tenant.roles)}; this needs "
            f"{_listed(roles)}"
        )


def _listed(roles: frozenset[Role]) -> str:
    return " or ".join(sorted(roles))


def _signature(path: Path | None) -> tuple[int, ...] | None:
    """What changes with the file, also when another takes its place, as Kubernetes does it; None if
    it is not there.
    """
    try:
        found = None if path is None else path.stat()
    except OSError:
        found = None
    return None if found is None else (found.st_ino, found.st_dev, found.st_mtime_ns, found.st_size)
