from __future__ import annotations

import pytest

from kv_transfer.retry_policy import PushAttempt, RetryPolicy
from kvrelay.errors import DataLoss, KvRelayError, Unavailable, Unimplemented

SHM = PushAttempt("shm", "same host")


def test_a_transport_that_auto_selected_is_replaced_by_grpc() -> None:
    following = RetryPolicy("auto").following(SHM, Unimplemented("no memfd"), commit_sent=False)
    assert following == PushAttempt("grpc", "shm failed: no memfd")


def test_a_commit_is_repeated_and_the_transport_stays_that_of_the_blocks() -> None:
    following = RetryPolicy("shm").following(SHM, Unavailable("gone"), commit_sent=True)
    assert following == PushAttempt("shm", "same host", commit_only=True)


@pytest.mark.parametrize(
    ("requested", "failed", "error", "commit_sent"),
    [
        ("shm", SHM, Unimplemented(""), False),
        ("auto", PushAttempt("grpc", ""), Unimplemented(""), False),
        ("auto", SHM, Unavailable(""), False),
        ("auto", SHM, DataLoss(""), True),
        ("auto", PushAttempt("shm", "", commit_only=True), Unavailable(""), True),
        ("auto", PushAttempt("shm", "", commit_only=True), Unimplemented(""), True),
    ],
)
def test_every_other_failure_ends_the_push(
    requested: str, failed: PushAttempt, error: KvRelayError, commit_sent: bool
) -> None:
    assert RetryPolicy(requested).following(failed, error, commit_sent=commit_sent) is None
