"""A capability is for one grant; whatever differs makes it worthless."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import PermissionDenied
from kvrelay.security.capability import (
    FetchGrant,
    Grant,
    PushGrant,
    check_capability,
    make_capability,
    make_key,
)

texts = st.text(max_size=8)
numbers = st.integers(0, 2**63 - 1)
pushes = st.builds(
    PushGrant,
    texts,
    numbers,
    texts,
    texts,
    numbers,
    numbers,
    numbers,
    numbers,
    st.floats(0, 1e6, exclude_min=True),
)
fetches = st.builds(FetchGrant, texts, numbers, texts, texts, texts, numbers, numbers)
grants = pushes | fetches
keys = st.binary(min_size=32, max_size=32)


@given(keys, grants)
def test_what_was_granted_passes(key: bytes, grant: Grant) -> None:
    check_capability(key, grant, make_capability(key, grant))


@given(keys, grants, st.data())
def test_any_single_changed_field_makes_it_invalid(
    key: bytes, grant: Grant, data: st.DataObject
) -> None:
    capability = make_capability(key, grant)
    for field in fields(grant):
        old = getattr(grant, field.name)
        other: st.SearchStrategy[Any] = (
            texts
            if isinstance(old, str)
            else st.floats(0, 1e6)
            if isinstance(old, float)
            else numbers
        )
        changed = replace(
            grant, **{field.name: data.draw(other.filter(lambda new, old=old: new != old))}
        )
        with pytest.raises(PermissionDenied):
            check_capability(key, changed, capability)


@given(keys, grants, st.text(max_size=40))
def test_nothing_else_passes(key: bytes, grant: Grant, shown: str) -> None:
    for wrong in (shown, "", make_capability(make_key(), grant), make_capability(key, grant)[:-1]):
        with pytest.raises(PermissionDenied, match="capability"):
            check_capability(key, grant, wrong)


@given(keys, st.text(max_size=4), st.text(max_size=4))
def test_text_does_not_flow_from_field_to_field(key: bytes, left: str, right: str) -> None:
    """Each field is hashed with its length."""
    one = FetchGrant("r", 0, left + right, "", "lender", 1, 1)
    other = FetchGrant("r", 0, left, right, "lender", 1, 1)
    assert (make_capability(key, one) == make_capability(key, other)) == (one == other)


class OtherGrant(FetchGrant):
    """Of the same fields."""


def test_a_grant_of_one_kind_is_none_of_the_other() -> None:
    key = make_key()
    fetch, other = (kind("r", 1, "2", "3", "4", 5, 6) for kind in (FetchGrant, OtherGrant))
    assert make_capability(key, fetch) != make_capability(key, other)
    with pytest.raises(PermissionDenied):
        check_capability(key, fetch, make_capability(key, other))
