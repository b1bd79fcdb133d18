"""Safeguards of standby workers: who joins, when the next one starts, and that no order to a worker
is lost.
"""

from __future__ import annotations

from mutants.mutant import Mutant

ACTUATOR = "autoscaler/actuator.py"
TESTS = "unit/autoscaler/test_actuator_standby.py"

MUTANTS = (
    Mutant(
        "a standby worker joins where one is missing",
        ACTUATOR,
        "missing -= await self._join(pool, missing + len(workers.pending))",
        "missing -= await self._join(pool, 0)",
        (
            f"{TESTS}::test_a_standby_takes_the_place_of_the_dead_and_is_replaced",
            f"{TESTS}::test_a_pool_that_grows_takes_the_standby_first",
        ),
    ),
    Mutant(
        "a refill obeys the delays of pools whose workers keep dying",
        ACTUATOR,
        "if pools_complete and self._workers.may_start():",
        "if pools_complete:",
        (
            f"{TESTS}::test_a_pool_that_keeps_dying_uses_standbys_up_no_faster_than_it_would_start_workers",
        ),
    ),
    Mutant(
        "a refill waits for the pools",
        ACTUATOR,
        'all(one.serving for one in workers.values() if one.pool != "standby")',
        "True",
        (
            f"{TESTS}::test_standbys_start_once_the_pools_are_complete",
            f"{TESTS}::test_the_next_standby_waits_until_the_last_has_joined",
        ),
    ),
    Mutant(
        "a standby worker that hangs in its start is stopped",
        "autoscaler/worker_watch.py",
        "await self._note_silence(worker_id, worker, has_entry=True)",
        "pass",
        (f"{TESTS}::test_a_standby_that_never_becomes_ready_is_replaced",),
    ),
    Mutant(
        "a standby worker that joins keeps the time limit of its start",
        "autoscaler/managed_workers.py",
        "ManagedWorker(pool, silent_polls=silent_polls)",
        "ManagedWorker(pool)",
        (f"{TESTS}::test_a_standby_that_joins_while_it_loads_keeps_the_time_limit_of_its_start",),
    ),
    Mutant(
        "decode gets the last standby worker",
        ACTUATOR,
        "reverse=self._standby > 0",
        "reverse=False",
        (f"{TESTS}::test_decode_gets_the_last_standby_when_both_pools_lose_a_worker",),
    ),
    Mutant(
        "a death starts a look",
        ACTUATOR,
        "log, self._launcher.ended)",
        "log)",
        (f"{TESTS}::test_a_death_starts_a_poll_before_the_next_one_is_due",),
    ),
    Mutant(
        "a change of a worker's state is told at once",
        "kvrelay/worker/worker.py",
        "engine.warm_up()\n        self.state_changed.set()",
        "engine.warm_up()",
        (
            "unit/worker/test_roles.py::test_readiness_is_told_at_once_and_not_with_the_next_heartbeat",
        ),
    ),
    Mutant(
        "an announced change starts a look of the router",
        "router/runtime/pool_changes.py",
        "look()",
        "pass",
        ("unit/router/runtime/test_driver.py::test_a_worker_is_found_without_a_poll",),
    ),
    Mutant(
        "orders that come before the fork are kept",
        "kvrelay/launch/actor.py",
        "self._orders.append(order)",
        "pass",
        ("unit/launch/test_template.py::test_orders_that_come_before_the_fork_are_kept",),
    ),
    Mutant(
        "a forked worker ends with its actor",
        "kvrelay/launch/template_process.py",
        "        loop.call_soon_threadsafe(roles.now)\n"
        "    except RuntimeError:\n"
        "        if not loop.is_closed():\n"
        "            raise\n"
        "        # It ends already, and there is nobody to give an order to.\n"
        "    time.sleep(_ORPHAN_S)\n"
        "    os._exit(_FAILED)",
        "    finally:\n        pass",
        ("unit/launch/test_template.py::test_it_ends_with_its_actor",),
    ),
    Mutant(
        "a forked worker that has ended takes no orders",
        "kvrelay/launch/template_process.py",
        "if not loop.is_closed():",
        "if True:",
        (
            "unit/launch/test_template.py::test_an_actor_that_goes_once_the_worker_has_ended_makes_no_noise",
        ),
    ),
    Mutant(
        "a frozen worker is killed after its actor",
        "kvrelay/launch/orphans.py",
        "signal.pidfd_send_signal(worker_fd, signal.SIGKILL)",
        "pass",
        ("unit/launch/test_template.py::test_a_frozen_worker_is_killed_after_its_actor",),
    ),
)
