"""A tenant's limit in several processes, against one bucket."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import random
import sys
from functools import partial
from pathlib import Path

import pytest

from kvrelay.errors import ResourceExhausted
from kvrelay.tenants import Tenant
from router.frontend.rate_limits import Bucket, Limits
from router.frontend.shared_bucket import SharedBucket, shared_bucket

TENANT = Tenant("acme / ../é", requests_per_minute=100, tokens_per_minute=1000)


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_processes_is_one_bucket(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    alone = Bucket(50, 0.0)
    shared = [SharedBucket(tmp_path / "acme", 50, 0.0) for _ in range(3)]
    now = 0.0
    for _ in range(200):
        now += random_.choice((0.0, random_.expovariate(1.0)))
        one = random_.randrange(3)
        if random_.random() < 0.05:
            # A process that was killed and started again.
            shared[one] = SharedBucket(tmp_path / "acme", 50, now)
        amount = random_.randint(0, 50)
        if random_.random() < 0.2:
            shared[one].give_back(amount)
            alone.give_back(amount)
        else:
            do = random_.choice(("take", "wait"))
            expected = getattr(alone, do)(amount, now)
            assert getattr(shared[one], do)(amount, now) == pytest.approx(expected)


def _take(folder: Path, number: int) -> int:
    """Returns how many of 100 requests are admitted. However busy this machine is, the process
    waits for the lock and does not count for itself.
    """
    sys.modules[SharedBucket.__module__]._LOCK_S = 60.0  # type: ignore[attr-defined]
    limits = Limits(partial(shared_bucket, folder))
    admitted = 0
    for _ in range(100):
        try:
            limits.take_request(TENANT, 5.0)
            admitted += 1
        except ResourceExhausted:
            limits.take_tokens(TENANT, 1, 5.0)
            limits.give_back(TENANT, 1)
    return admitted


def test_processes_at_the_same_time_admit_what_the_limit_allows(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        admitted = pool.starmap(_take, [(tmp_path, number) for number in range(4)])
    assert sum(admitted) == TENANT.requests_per_minute
    limits = Limits(partial(shared_bucket, tmp_path))
    limits.take_tokens(TENANT, 1000, 5.0)
    # A file of a fixed size for each limit.
    assert sorted(one.stat().st_size for one in tmp_path.iterdir()) == [24, 24]


@pytest.mark.parametrize("seed", range(10))
def test_processes_that_disagree_on_the_limit_admit_no_more_than_the_larger(
    tmp_path: Path, seed: int
) -> None:
    """They read a changed tokens file one after the other."""
    random_ = random.Random(seed)
    shared = [SharedBucket(tmp_path / "acme", 100, 0.0) for _ in range(2)]
    admitted = 0
    for _ in range(500):
        one = random_.randrange(2)
        allowed = (100, random_.choice((10, 100)))[one]
        if shared[one].per_minute != allowed:
            shared[one].resize(allowed, 0.0)
        admitted += shared[one].take(1, 0.0) == 0.0
    assert 0 < admitted <= 100


def test_without_its_folder_a_process_counts_for_itself(tmp_path: Path) -> None:
    bucket = SharedBucket(tmp_path / "gone" / "acme", 10, 0.0)
    assert [bucket.take(5, 0.0) == 0.0 for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("call", ["flock", "pread"])
def test_an_error_of_the_file_leaves_each_process_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    bucket = SharedBucket(tmp_path / "acme", 50, 0.0)
    opened = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr({"flock": fcntl, "pread": os}[call], call, fails)
    assert [bucket.take(30, 0.0) > 0 for _ in range(20)] == [False] + [True] * 19
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_process_that_is_frozen_with_the_lock_holds_nobody_up(tmp_path: Path) -> None:
    bucket = SharedBucket(tmp_path / "acme", 50, 0.0)
    with (tmp_path / "acme").open() as frozen:
        fcntl.flock(frozen, fcntl.LOCK_EX)
        assert bucket.take(20, 0.0) == 0
        assert bucket.take(20, 0.0) == 0
        bucket.give_back(15)
    # Others see what was taken meanwhile once the file is free.
    assert bucket.wait(1, 0.0) == 0
    assert SharedBucket(tmp_path / "acme", 50, 0.0).take(26, 0.0) > 0
    assert SharedBucket(tmp_path / "acme", 50, 0.0).take(25, 0.0) == 0


def test_after_a_freeze_a_tenant_owes_at_most_the_limit_of_a_minute(tmp_path: Path) -> None:
    shared = [SharedBucket(tmp_path / "acme", 60, 0.0) for _ in range(4)]
    with (tmp_path / "acme").open() as frozen:
        fcntl.flock(frozen, fcntl.LOCK_EX)
        for now in range(0, 600, 60):
            assert all(one.take(60, float(now)) == 0 for one in shared)
    for one in shared:
        one.wait(1, 600.0)
    # A minute until nothing is owed, and a second for each token.
    assert all(one.wait(1, 600.0) == pytest.approx(61) for one in shared)


class Clock:
    """A clock that only sleep moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


def test_a_freeze_blocks_the_event_loop_once_in_a_tenth_of_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("router.frontend.shared_bucket.time", clock)
    bucket = SharedBucket(tmp_path / "acme", 50, 0.0)
    with (tmp_path / "acme").open() as frozen:
        fcntl.flock(frozen, fcntl.LOCK_EX)
        for seconds in range(1, 4):
            for _ in range(100):
                bucket.wait(1, 0.0)
            assert clock.slept == pytest.approx(0.002 * seconds, rel=0.1)
            clock.now += 0.11
        assert bucket.take(20, 0.0) == 0
    # It tries without waiting, so it has the lock as soon as the file is free.
    assert bucket.wait(30, 0.0) == 0
    assert SharedBucket(tmp_path / "acme", 50, 0.0).take(31, 0.0) > 0
