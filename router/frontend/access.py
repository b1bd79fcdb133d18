"""Access control: maps bearer tokens to tenants. The tokens file is read again when it changes."""

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

# A removed token is rejected after at most about this time.
POLL_S = 1.0
MAX_TOKEN = 512  # characters

log = get_logger("router.access")


class Access:
    """The tenants of a tokens file. Without a tokens file every caller is ANONYMOUS and may do
    everything; configurations allow that on loopback only.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError if the file cannot be used. A router does not start with a broken
        file.
        """
        self._path = path
        self._seen = _signature(path)
        self._tenants: Mapping[bytes, Tenant] = {} if path is None else load_tokens(path)
        # A dedicated thread, so that a removed token is rejected in time even if clients keep other
        # threads busy.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokens file")
        self.failed_loads = 0
        self._trouble = ""
        # Number of callers without a known token.
        self.refusals = 0

    @property
    def open(self) -> bool:
        """Whether callers need no token."""
        return self._path is None

    @property
    def names(self) -> frozenset[str]:
        """Names of all tenants."""
        return frozenset(tenant.name for tenant in self._tenants.values())

    def trouble(self) -> str:
        """Returns why the file as it is now cannot be used; empty if it is used."""
        return self._trouble

    def admit(self, authorization: Sequence[str], roles: frozenset[Role]) -> Tenant:
        """Returns the tenant of `Bearer TOKEN`. `authorization` holds all authorization headers;
        the tenant needs one of the roles.

        Raises Unauthenticated, PermissionDenied.
        """
        if self.open:
            return ANONYMOUS
        tenant = self._tenant(authorization)
        check_role(tenant, roles)
        return tenant

    async def watch(self, changed: Callable[[], None]) -> None:
        """Reloads the file until cancelled. Calls `changed` after a reload.

        It also logs the number of rejected callers since the last poll, in a single event.
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
        """Reads the file if it has changed. Returns whether new tenants are in force. A broken file
        is logged and changes nothing.
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
            self._trouble = f"{error.message}; the tokens read before it stay in force"
            log.error("tokens_file_rejected", reason=error.message)
            return False
        self._trouble = ""
        log.info("tokens_file_loaded", tenants=len(self.names), tokens=len(self._tenants))
        return True

    def _tenant(self, authorization: Sequence[str]) -> Tenant:
        if not authorization:
            self.refusals += 1
            raise Unauthenticated(
                "this cluster requires a token; send the header `authorization: Bearer TOKEN`, or "
                "give kvrelay's commands --token-file"
            )
        scheme, _, token = authorization[0].partition(" ")
        if len(authorization) > 1 or scheme.lower() != "bearer" or not 0 < len(token) <= MAX_TOKEN:
            self.refusals += 1
            raise Unauthenticated(
                "the header authorization is invalid; send `authorization: Bearer TOKEN` once"
            )
        # The lookup key is a hash of the token. Its timing reveals only how far two hashes agree,
        # which does not help to guess a token.
        tenant = self._tenants.get(hashlib.sha256(token.encode(errors="replace")).digest())
        if tenant is None:
            self.refusals += 1
            raise Unauthenticated(
                "the token is unknown or was revoked; ask the operator for a valid token"
            )
        return tenant


def check_role(tenant: Tenant, roles: frozenset[Role]) -> None:
    """Raises PermissionDenied if the tenant has none of the roles."""
    if not tenant.roles & roles:
        raise PermissionDenied(
            f"tenant {tenant.name} has the role {_listed(tenant.roles)}; this call requires "
            f"{_listed(roles)}"
        )


def _listed(roles: frozenset[Role]) -> str:
    return " or ".join(sorted(roles))


def _signature(path: Path | None) -> tuple[int, ...] | None:
    """Returns a value that changes with the file, also when another file replaces it, as in
    Kubernetes. None if the file does not exist.
    """
    try:
        found = None if path is None else path.stat()
    except OSError:
        found = None
    return None if found is None else (found.st_ino, found.st_dev, found.st_mtime_ns, found.st_size)
