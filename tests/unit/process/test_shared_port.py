"""One claim of a port at a time, whatever another process does between two steps of it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from kvrelay.process import shared_port
from kvrelay.process.held_port import held_port
from kvrelay.process.shared_port import claim_port, share
from kvrelay.process.tcp_address import socket_for

STEPS = ("setsockopt", "bind", "listen", "shutdown")


class Interrupted(socket.socket):
    """A socket beside which something happens before one of its steps."""

    before: Callable[[], None]
    step: int

    def _next(self) -> None:
        if self.step == 0:
            self.before()
        self.step -= 1


for name in STEPS:

    def stepped(self: Interrupted, *arguments: object, _name: str = name) -> None:
        self._next()
        getattr(socket.socket, _name)(self, *arguments)

    setattr(Interrupted, name, stepped)


def interrupted_claim(
    address: str, step: int, before: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> tuple[socket.socket | None, bool]:
    """Returns the claim, if it succeeds, and whether it had so many steps."""

    plain, target = socket_for(address)
    plain.close()
    made = Interrupted(plain.family, plain.type, plain.proto)
    made.before, made.step = before, step
    # The other claim has a plain socket.
    sockets = iter([(made, target)])
    monkeypatch.setattr(shared_port, "socket_for", lambda at: next(sockets, None) or socket_for(at))
    try:
        return claim_port(address)[0], made.step < 0
    except OSError:
        return None, made.step < 0


@pytest.fixture(params=["127.0.0.1", "[::1]", "0.0.0.0"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        claim, address = claim_port(f"{request.param}:0")
    except OSError:
        pytest.skip("no such address here")
    claim.close()
    return address


def is_free(address: str) -> bool:
    try:
        with held_port(address):
            return True
    except OSError:
        return False


def listener_at(address: str) -> socket.socket:
    """Listens as a router process does."""
    listener, target = socket_for(address)
    share(listener)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(target)
    listener.listen(5)
    return listener


def test_of_two_claims_at_the_same_moment_one_succeeds(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[socket.socket] = []

    def another() -> None:
        with suppress(OSError):
            others.append(claim_port(address)[0])

    steps, is_cut = 0, True
    while is_cut:
        others.clear()
        claim, is_cut = interrupted_claim(address, steps, another, monkeypatch)
        claims = [*others, *filter(None, [claim])]
        assert len(claims) == 1, steps
        claims[0].close()
        steps += 1
    assert steps > len(STEPS)


def test_a_claimed_port_is_free_for_those_only_that_share_it(address: str) -> None:
    with ExitStack() as sockets:
        sockets.enter_context(closing(claim_port(address)[0]))
        for _ in range(2):
            assert not is_free(address)
            with pytest.raises(OSError, match="in use"):
                claim_port(address)
            listeners = [sockets.enter_context(closing(listener_at(address))) for _ in range(2)]
            for listener in listeners:
                listener.close()
    assert is_free(address)


def test_a_port_that_the_kernel_chose_is_claimed_too() -> None:
    claim, address = claim_port("127.0.0.1:0")
    with closing(claim):
        assert not is_free(address)
        with pytest.raises(OSError, match="in use"):
            claim_port(address)
        with closing(listener_at(address)):
            pass


def connection_to(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), 10)


def test_a_port_is_claimed_again_although_connections_to_it_still_end(address: str) -> None:
    with (
        closing(claim_port(address)[0]),
        closing(listener_at(address)) as listener,
        closing(connection_to(address)),
    ):
        # Who closes first waits in TIME_WAIT.
        listener.accept()[0].close()
    with closing(claim_port(address)[0]):
        assert not is_free(address)


def test_all_connections_reach_those_that_listen(address: str) -> None:
    with closing(claim_port(address)[0]), closing(listener_at(address)) as listener:
        for _ in range(20):
            with (
                closing(connection_to(address)) as client,
                closing(listener.accept()[0]) as served,
            ):
                served.sendall(b"x")
                assert client.recv(1) == b"x"
