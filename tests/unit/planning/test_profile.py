"""The file of a profile."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import simulated

from kvrelay.errors import InvalidArgument
from kvrelay.planning.profile import Profile


def document(**changes: Any) -> dict[str, Any]:
    return simulated.profile().to_json() | changes


def test_a_profile_is_read_as_it_was_written() -> None:
    profile = simulated.profile()
    assert Profile.parse(json.dumps(profile.to_json())) == profile


def test_step_costs_need_the_size_of_a_token() -> None:
    costs = json.dumps(simulated.profile().costs.to_json())
    with pytest.raises(InvalidArgument, match="--kv-token-bytes"):
        Profile.parse(costs)
    assert Profile.parse(costs, 2048).kv_token_bytes == 2048


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a profile"),
        ("[" * 100_000, "not a profile"),
        ("[]", "not a profile; give a file"),
        (json.dumps(document(format="x")), "its format is 'x'"),
        (json.dumps(document(kv_token_bytes=0)), "kv_token_bytes is 0"),
        (json.dumps(document(kv_token_bytes=True)), "kv_token_bytes is True"),
        (json.dumps(document(vocab_size=1.5)), "vocab_size is 1.5"),
        (json.dumps(document(machine=7)), "machine is 7"),
        (json.dumps(document(residuals={"x": "y"})), "residuals"),
        (json.dumps(document(residuals={"x": float("nan")})), "residuals"),
        (json.dumps(document(more=1)), "'more' is not a known key"),
        (json.dumps(document(costs=None)), "not step costs"),
        (json.dumps({k: v for k, v in document().items() if k != "costs"}), "costs is missing"),
    ],
)
def test_other_files_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        Profile.parse(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(document())), JSON)
def test_any_value_is_read_or_refused(key: str, value: Any) -> None:
    with suppress(InvalidArgument):
        found = Profile.parse(json.dumps(document(**{key: value})))
        assert Profile.parse(json.dumps(found.to_json())) == found
