"""HTTP authentication. It covers every route and unknown paths."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from kvrelay.errors import KvRelayError, PermissionDenied
from kvrelay.loopback import is_loopback
from kvrelay.tenants import ANONYMOUS, ANY_ROLE
from router.api.http.error_responses import error_response, new_request_id
from router.frontend.access import Access
from router.frontend.waiting_room import WaitingRoom


class HttpAccess:
    """Authenticates requests and stores the caller's tenant in `scope["state"]["tenant"]`. Each
    route checks its own roles.

    Without a tokens file, any client that can reach the port is admitted. Such a client can be a
    web page of any site that a browser on this machine shows. So this class rejects a request that
    a browser sends for another site:
    - by its Origin header
    - by a Host header that does not name this machine, which also stops DNS rebinding
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        open_paths: Collection[str],
        address: str,
        waiting_room: WaitingRoom,
    ) -> None:
        """`open_paths` need no token. `address` is the listener's HOST:PORT."""
        self._app = app
        self._access = access
        self._open_paths = frozenset(open_paths)
        self._host = _host_name(address)
        self._waiting_room = waiting_room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes an admitted request to the app, or sends an error response."""
        assert scope["type"] == "http", "websockets and lifespan are off"
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        try:
            if self._access.open:
                self._check_site(
                    scope["scheme"], _values(headers, b"host"), _values(headers, b"origin")
                )
            tenant = ANONYMOUS
            if scope["path"] not in self._open_paths:
                tenant = self._access.admit(_credentials(headers), ANY_ROLE)
        except KvRelayError as error:
            request_id = new_request_id()
            response = error_response(error, scope["path"], request_id)
            response.headers["x-request-id"] = request_id
            if not await self._waiting_room.stranger():
                response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        scope["state"]["tenant"] = tenant
        await self._app(scope, receive, send)

    def _check_site(self, scheme: str, hosts: list[str], origins: list[str]) -> None:
        """Rejects requests of other sites' web pages. Raises PermissionDenied."""
        name = _host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None or not (name == self._host or is_loopback(f"{name}:0")):
            shown = ", ".join(hosts)[:100] or "missing"
            raise PermissionDenied(
                f"the header Host is {shown!r}; without a tokens file, allowed are localhost "
                f"and {self._host}",
                field="host",
            )
        if origins and origins != [f"{scheme}://{hosts[0]}"]:
            raise PermissionDenied(
                f"the request comes from a page of {origins[0]!r:.100}, which this router does "
                "not serve; configure a tokens file, or send the request without a browser",
                field="origin",
            )


def _values(headers: list[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key == name]


def _credentials(headers: list[tuple[bytes, bytes]]) -> list[str]:
    """Returns the values of the header Authorization. Without one, a token in x-api-key, where
    Anthropic's clients send it, counts as a bearer token.
    """
    given = _values(headers, b"authorization")
    return given or [f"Bearer {one}" for one in _values(headers, b"x-api-key")]


def _host_name(host: str) -> str | None:
    """Returns the host name of HOST or HOST:PORT, or None if the text is neither."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
