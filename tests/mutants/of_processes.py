"""Safeguards of a router of several processes."""

from __future__ import annotations

from mutants.mutant import Mutant

EXPOSITION = "router/observability/exposition.py"
SHARED_BUCKET = "router/frontend/shared_bucket.py"
SEVERAL = "unit/router/test_several_processes.py::"
SHARED_PORT = "unit/process/test_shared_port.py::"

MUTANTS = (
    Mutant(
        "a text in a label is not a family of metrics",
        EXPOSITION,
        '_HELP = b"\\n# HELP "',
        '_HELP = b"# HELP "',
        (
            "unit/router/observability/test_joined_texts.py::"
            "test_has_every_sample_once_and_every_family_once",
        ),
    ),
    Mutant(
        "series of each process have a label of their own",
        EXPOSITION,
        "{PROCESS: str(number)}",
        "{}",
        (SEVERAL + "test_any_process_tells_of_all",),
    ),
    Mutant(
        "scrapes that wait for siblings make one text",
        EXPOSITION,
        "if (known := self.fresh(key)) is not None:",
        "if (known := self.fresh(key)) and False:",
        ("unit/router/api/test_pacing.py::test_one_exposition_serves_all_who_ask_at_a_time",),
    ),
    Mutant(
        "a tenant sees its own requests of other processes",
        "router/observability/dashboard.py",
        "Tenant(viewer, frozenset(roles))",
        'Tenant(viewer, frozenset({"admin"}))',
        (SEVERAL + "test_any_process_tells_of_all",),
    ),
    Mutant(
        "the processes of a router share limits",
        SHARED_BUCKET,
        "if len(state := os.pread(file, _STATE.size, 0)) == _STATE.size:",
        "if len(state := b'') == _STATE.size:",
        (
            "unit/router/frontend/test_shared_bucket.py::"
            "test_processes_at_the_same_time_admit_what_the_limit_allows",
            SEVERAL + "test_limits_and_revocation_hold_for_all_processes",
        ),
    ),
    Mutant(
        "a limit that changes many times admits no more",
        SHARED_BUCKET,
        "self._level = min(self._level, per_minute)",
        "self._level = max(0.0, self._level + per_minute - self.per_minute)",
        (
            "unit/router/frontend/test_shared_bucket.py::"
            "test_processes_that_disagree_on_the_limit_admit_no_more_than_the_larger",
        ),
    ),
    Mutant(
        "of two routers that start at the same moment, one has the ports",
        "kvrelay/process/shared_port.py",
        "            claim.listen(1)\n",
        "            pass\n",
        (SHARED_PORT + "test_of_two_claims_at_the_same_moment_one_succeeds",),
    ),
    Mutant(
        "a claimed port is not free",
        "kvrelay/process/shared_port.py",
        "socket.SO_REUSEADDR, 0)",
        "socket.SO_REUSEADDR, 1)",
        (SHARED_PORT + "test_a_claimed_port_is_free_for_those_only_that_share_it",),
    ),
)
