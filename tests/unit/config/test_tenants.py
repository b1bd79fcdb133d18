from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.tenants import ANONYMOUS, Tenant

SALTS = st.text(max_size=4) | st.sampled_from(["0" * 64, "1" * 64])
REQUESTS = st.tuples(SALTS, st.none() | SALTS)  # the tenant's salt, and the client's


@given(st.lists(REQUESTS, unique=True, min_size=2, max_size=20))
def test_no_cache_salt_leads_to_the_salt_of_another_tenant_or_of_another_cache_salt(
    requests: list[tuple[str, str | None]],
) -> None:
    found = [Tenant("t", salt=salt).salt_for(cache_salt) for salt, cache_salt in requests]
    assert len(set(found)) == len(found)


@given(REQUESTS)
def test_equal_requests_share_one_salt_whatever_the_tenant_may_do_besides(
    request: tuple[str, str | None],
) -> None:
    salt, cache_salt = request
    one, other = Tenant("t", salt=salt), Tenant("t", salt=salt, weight=2.0, max_running=3)
    assert one.salt_for(cache_salt) == other.salt_for(cache_salt)
    assert one.salt_for(None) == salt


def test_a_cluster_without_tenants_keeps_its_users_apart_too() -> None:
    assert len({ANONYMOUS.salt_for(one) for one in (None, "ann", "bob")}) == 3
