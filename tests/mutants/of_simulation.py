"""Safeguards of the simulation and of the profile's fit."""

from __future__ import annotations

from mutants.mutant import Mutant

_PROPERTIES = "unit/simulation/test_simulation_properties.py"

MUTANTS = (
    Mutant(
        name="a run of decode steps begins without spare blocks",
        file="kvrelay/simulation/decode_steps.py",
        before="if not self._prompts and self._has_room():",
        after="if not self._prompts:",
        tests=(f"{_PROPERTIES}::test_batches_that_outgrow_their_blocks_are_preempted",),
    ),
    Mutant(
        name="no worker replaces a dead one in a simulation",
        file="kvrelay/simulation/controller.py",
        before="if not worker.draining:",
        after="if worker.draining:",
        tests=(f"{_PROPERTIES}::test_a_killed_worker_costs_time_and_no_request",),
    ),
    Mutant(
        name="the router is not told of single steps",
        file="kvrelay/simulation/router.py",
        before="self.dispatcher.stepped(worker_id, size, seconds, now)",
        after="pass",
        tests=(f"{_PROPERTIES}::test_the_router_measures_single_steps",),
    ),
    Mutant(
        name="a fitted cost may be negative",
        file="kvrelay/bench/profiling/fit.py",
        before="if np.any(found < 0):",
        after="if False:",
        tests=("unit/bench/test_profiling.py::test_no_other_coefficients_fit_better",),
    ),
)
