"""Safeguards of the simulation, of the plan and of the profile's fit."""

from __future__ import annotations

from mutants.mutant import Mutant

_PROPERTIES = "unit/simulation/test_simulation_properties.py"
_CLOSED_FORMS = "unit/simulation/test_closed_forms.py"
_CALIBRATION = "unit/simulation/test_calibration.py"
_MACHINE = "unit/simulation/test_machine.py"
_PROFILING = "unit/bench/test_profiling.py"
_DEVICES = "unit/planning/test_tensor_parallel_kv.py"


def _mutant(name: str, file: str, before: str, after: str, test: str) -> Mutant:
    """A mutant of a file of kvrelay that one test finds."""
    return Mutant(name=name, file=f"kvrelay/{file}", before=before, after=after, tests=(test,))


MUTANTS = (
    _mutant(
        "a run of decode steps begins without spare blocks",
        "simulation/decode_steps.py",
        "if not self._prompts and self._has_room():",
        "if not self._prompts:",
        f"{_PROPERTIES}::test_batches_that_outgrow_their_blocks_are_preempted",
    ),
    _mutant(
        "no worker replaces a dead one in a simulation",
        "simulation/controller.py",
        "if not worker.draining:",
        "if worker.draining:",
        f"{_PROPERTIES}::test_a_killed_worker_costs_time_and_no_request",
    ),
    _mutant(
        "the router is not told of single steps",
        "simulation/router.py",
        "self.dispatcher.stepped(worker_id, size, seconds, now)",
        "pass",
        f"{_PROPERTIES}::test_the_router_measures_single_steps",
    ),
    _mutant(
        "the blocks of a simulation have no bound",
        "simulation/scenario.py",
        "if blocks > MAX_BLOCKS:",
        "if False:",
        f"{_CLOSED_FORMS}::test_the_blocks_of_all_workers_are_bounded",
    ),
    _mutant(
        "a fitted cost may be negative",
        "planning/least_squares.py",
        "np.any(found < 0) or ",
        "",
        f"{_PROFILING}::test_no_other_coefficients_fit_better",
    ),
    _mutant(
        "a fit may have an error of 0 because it has too few measurements",
        "bench/profiling/fit.py",
        "few = len(y) <= x.shape[-1]",
        "few = False",
        f"{_PROFILING}::test_too_few_measurements_are_refused",
    ),
    _mutant(
        "sequences above a bend take no longer",
        "planning/step_cost_model.py",
        "seconds += more_s * (batch - least)",
        "pass",
        "unit/planning/test_step_cost_model.py::test_sequences_above_a_bend_take_longer",
    ),
    _mutant(
        "a profile has as many bends as batches",
        "bench/profiling/run.py",
        "between[: max(0, spare)]",
        "between",
        f"{_PROFILING}::test_a_fit_has_a_measurement_more_than_coefficients",
    ),
    _mutant(
        "planned steps are slowed by a neighbour that begins",
        "simulation/machine.py",
        "self.slowed(ratio)",
        "pass",
        f"{_MACHINE}::test_a_prompt_slows_the_answer_beside_it",
    ),
    _mutant(
        "a prefill worker without prompts slows nobody",
        "simulation/prefill.py",
        "self.process.ends()",
        "pass",
        f"{_MACHINE}::test_a_prompt_slows_the_answer_beside_it",
    ),
    _mutant(
        "a report of every n-th request calibrates nothing",
        "simulation/calibration.py",
        "if report.row_every != 1:",
        "if False:",
        f"{_CALIBRATION}::test_a_test_that_tells_too_little_is_refused",
    ),
    _mutant(
        "failed requests kept workers busy",
        "simulation/calibration.py",
        "if skipped > _MOST_SKIPPED * total:",
        "if False:",
        f"{_CALIBRATION}::test_a_test_that_tells_too_little_is_refused",
    ),
    _mutant(
        "a profile of another machine is refused",
        "simulation/calibration.py",
        "if not low <= times[pool].alone <= high:",
        "if False:",
        f"{_CALIBRATION}::test_a_test_that_tells_too_little_is_refused",
    ),
    _mutant(
        "a response with several tokens is no step",
        "simulation/calibration.py",
        "if len(one.times) == one.row.output_tokens",
        "if True",
        f"{_CALIBRATION}::test_a_response_with_several_tokens_is_no_step",
    ),
    _mutant(
        "a stall of the machine is no step",
        "simulation/calibration.py",
        "ratios <= _STALL * np.median(ratios)",
        "ratios > 0",
        f"{_CALIBRATION}::test_a_stall_of_the_machine_is_no_step",
    ),
    _mutant(
        "devices without a KV head of their own keep none",
        "planning/kv_size.py",
        "kept = -(-layer.kv.kv_heads // self.degree) * self.degree",
        "kept = layer.kv.kv_heads",
        f"{_DEVICES}::test_devices_keep_whole_heads_and_whole_latent_vectors",
    ),
)
