from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.config.redis_url import Sentinels, hosts_of
from kvrelay.config.schema import RedisConfig
from kvrelay.errors import Unavailable
from kvrelay.state.registry import Registry

hosts = st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True)
words = st.text(
    st.characters(codec="ascii", min_codepoint=33, exclude_characters="/?#[]"),
    min_size=1,
    max_size=20,
)


@given(
    st.lists(st.tuples(hosts, st.integers(1, 65535)), min_size=1, max_size=4),
    st.from_regex(r"[A-Za-z0-9_-]{1,20}", fullmatch=True),
    st.integers(0, 15),
    st.booleans(),
)
def test_addresses_of_sentinels(
    addresses: list[tuple[str, int]], service: str, db: int, tls: bool
) -> None:
    where = ",".join(f"{host}:{port}" for host, port in addresses)
    url = f"redis{'s' * tls}+sentinel://user:p%40ss@{where}/{service}?db={db}"
    assert Sentinels.parse(url) == Sentinels(tuple(addresses), service, db, "user", "p@ss", tls)
    assert hosts_of(url) == tuple(host for host, _ in addresses)
    assert RedisConfig(url=url).url == url


def test_what_need_not_be_said() -> None:
    assert Sentinels.parse("redis+sentinel://one,two:5,[::1]:6/main") == Sentinels(
        (("one", 26379), ("two", 5), ("::1", 6)), "main"
    )
    assert Sentinels.parse("redis://one:5/0") is None
    assert hosts_of("redis://:secret@one:5/0") == ("one",)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+sentinel://one:5", "the service name"),
        ("redis+sentinel://one:5/a/b", "the service name"),
        ("redis+sentinel:///main", "HOST or HOST:PORT"),
        ("redis+sentinel://one,,two/main", "HOST or HOST:PORT"),
        ("redis+sentinel://one:99999/main", "Port out of range"),
        ("redis+sentinel://one:x/main", "Port could not be cast"),
        ("redis+sentinel://one/main?db=x", "db=NUMBER"),
        ("redis+sentinel://one/main?socket_timeout=1", "db=NUMBER"),
    ],
)
def test_what_is_wrong_with_an_address(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Sentinels.parse(url)
    with pytest.raises(ValueError, match=reason):
        RedisConfig(url=url)


@given(words)
def test_any_text_is_taken_or_refused(text: str) -> None:
    with suppress(ValueError):
        assert Sentinels.parse(f"redis+sentinel://{text}/main") is not None


async def test_nobody_answers_and_no_password_is_told() -> None:
    with pytest.raises(Unavailable) as refused:
        await Registry.connect("redis+sentinel://:geheim@127.0.0.1:1/main")
    assert "127.0.0.1:1/main" in refused.value.message
    assert "geheim" not in refused.value.message
