"""What tenants may use in a minute, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidArgument, ResourceExhausted
from kvrelay.tenants import ANONYMOUS, Tenant
from router.frontend.rate_limits import Bucket, Limits

ACME = Tenant("acme", requests_per_minute=60, tokens_per_minute=600)
OTHER = Tenant("other", requests_per_minute=60, tokens_per_minute=600)


def test_a_minute_of_requests_then_one_a_second() -> None:
    limits = Limits()
    for _ in range(60):
        limits.take_request(ACME, 10.0)
    with pytest.raises(
        ResourceExhausted, match="acme has used its limit of 60 requests per minute"
    ) as caught:
        limits.take_request(ACME, 10.0)
    assert caught.value.retry_after_s == pytest.approx(1.0)
    limits.take_request(OTHER, 10.0)
    with pytest.raises(ResourceExhausted):
        limits.take_request(ACME, 10.9)
    limits.take_request(ACME, 11.0)
    with pytest.raises(ResourceExhausted):
        limits.take_request(ACME, 11.0)


def test_each_choice_counts_as_a_request() -> None:
    limits = Limits()
    limits.take_request(ACME, 10.0, choices=32)
    limits.take_request(ACME, 10.0, choices=28)
    with pytest.raises(ResourceExhausted) as caught:
        limits.take_request(ACME, 10.0, choices=2)
    assert caught.value.retry_after_s == pytest.approx(2.0)
    with pytest.raises(
        InvalidArgument, match="n is 61; tenant acme may send 60 requests per minute"
    ) as never:
        limits.take_request(ACME, 100.0, choices=61)
    assert never.value.field == "n"


def test_the_told_delay_is_enough_and_not_more() -> None:
    bucket = Bucket(600, 0.0)
    assert bucket.take(600, 0.0) == 0.0
    wait = bucket.take(37, 0.0)
    assert wait == pytest.approx(3.7)
    assert bucket.take(37, wait - 0.1) > 0
    assert bucket.take(37, wait + 1e-9) == 0.0


def test_tokens_that_were_not_used_are_given_back() -> None:
    limits = Limits()
    limits.take_tokens(ACME, 600, 0.0)
    with pytest.raises(ResourceExhausted, match="600 tokens per minute"):
        limits.take_tokens(ACME, 100, 0.0)
    limits.give_back(ACME, 100)
    limits.take_tokens(ACME, 100, 0.0)
    limits.give_back(ACME, 10_000)  # never more than a minute's
    limits.take_tokens(ACME, 600, 0.0)
    with pytest.raises(ResourceExhausted):
        limits.take_tokens(ACME, 1, 0.0)


def test_what_never_fits_is_the_requests_own_fault() -> None:
    with pytest.raises(
        InvalidArgument, match="601 tokens together; tenant acme may use 600 tokens per minute"
    ) as caught:
        Limits().take_tokens(ACME, 601, 0.0)
    assert caught.value.field == "max_tokens"


def test_who_has_no_limit_is_not_counted() -> None:
    limits = Limits()
    for _ in range(10_000):
        limits.take_request(ANONYMOUS, 0.0)
        limits.take_tokens(ANONYMOUS, 10**9, 0.0)
    limits.give_back(ANONYMOUS, 5)


def test_a_limit_that_is_changed_keeps_what_was_used() -> None:
    limits = Limits()
    for _ in range(50):
        limits.take_request(ACME, 0.0)
    less = Tenant("acme", requests_per_minute=20)
    with pytest.raises(ResourceExhausted):
        limits.take_request(less, 0.0)
    more = Tenant("acme", requests_per_minute=100)
    for _ in range(80):
        limits.take_request(more, 0.0)
    with pytest.raises(ResourceExhausted):
        limits.take_request(more, 0.0)


def test_a_tenant_that_left_is_forgotten() -> None:
    limits = Limits()
    for tenant in (ACME, OTHER):
        limits.take_request(tenant, 0.0)
        limits.take_tokens(tenant, 600, 0.0)
    limits.keep({"other"})
    limits.take_tokens(ACME, 600, 0.0)
    with pytest.raises(ResourceExhausted):
        limits.take_tokens(OTHER, 600, 0.0)


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 1000)), max_size=50),
)
def test_in_no_time_is_more_taken_than_a_bucketful_and_what_flowed_in(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    bucket, now, taken = Bucket(per_minute, 0.0), 0.0, 0
    for pause, amount in steps:
        now += pause
        amount = min(amount, per_minute)
        if bucket.take(amount, now) == 0.0:
            taken += amount
        assert taken <= per_minute * (1 + now / 60) + 1e-6
