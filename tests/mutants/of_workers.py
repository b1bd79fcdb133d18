"""Safeguards of the workers and their engine: commands once, blocks accounted for, draws by position, tenants apart."""

from __future__ import annotations

from mutants.mutant import Mutant

BASE = "kvrelay/worker/base.py"
BLOCKS = "kvrelay/engine/blocks.py"
DECODE = "decode_worker/worker.py"

MUTANTS = (
    Mutant(
        "a reservation that is repeated is made once",
        DECODE,
        "if spec.key not in self.sessions:\n                    if self._has_seat",
        "if True:\n                    if self._has_seat",
        ("worker/test_relay.py::test_a_repeated_command_is_run_once",),
    ),
    Mutant(
        "a local run that is repeated is run once",
        DECODE,
        "if spec.key not in self.sessions and self._has_seat(spec, session):",
        "if self._has_seat(spec, session):",
        ("worker/test_relay.py::test_a_repeated_command_is_run_once",),
    ),
    Mutant(
        "a prefill that is repeated is run once",
        "prefill_worker/worker.py",
        "if spec.key not in self._relays and self.can_run(spec, session):",
        "if self.can_run(spec, session):",
        ("worker/test_relay.py::test_a_repeated_prefill_is_run_once",),
    ),
    Mutant(
        "a request of another router by the same name",
        BASE,
        "if key is None or self.sessions.get(key, session) is session:",
        "if True:",
        ("worker/test_blame.py::test_routers_with_requests_of_one_name_do_not_meet",),
    ),
    Mutant(
        "when a router goes its sequences go",
        BASE,
        "for key in [key for key, owner in self.sessions.items() if owner is session]:",
        "for key in ():",
        ("worker/test_relay.py::test_when_a_router_goes_its_sequences_go",),
    ),
    Mutant(
        "a sequence that does not fit is refused by the worker",
        BASE,
        "if not 0 < length < most:",
        "if not 0 < length:",
        ("worker/test_relay.py::test_a_prompt_past_the_context_is_refused_by_the_worker_itself",),
    ),
    Mutant(
        "a token that the model does not have is refused by the worker",
        BASE,
        "elif not 0 <= min(spec.token_ids) <= max(spec.token_ids) < self.runner.vocab_size:",
        "elif False:",
        ("worker/test_blame.py::test_a_token_that_the_model_does_not_have_is_its_own_requests_affair",),
    ),
    Mutant(
        "a commit is for the sequence as it is",
        DECODE,
        "if num_tokens != expected or not 0 <= first_token < self.runner.vocab_size:",
        "if False:",
        ("decode_worker/test_decode_worker.py::test_a_commit_of_something_else_ends_the_attempt_and_harms_nobody",),
    ),
    Mutant(
        "a worker that drains, starts or is stuck takes nothing",
        BASE,
        'if self.state != "ready":',
        "if False:",
        (
            "decode_worker/test_decode_worker.py::test_a_draining_worker_refuses_and_becomes_empty",
            "worker/test_liveness.py::test_a_worker_is_given_no_work_before_its_first_real_steps",
        ),
    ),
    Mutant(
        "a step that hangs ends its worker",
        "kvrelay/worker/step_watch.py",
        "return self.age_s > self.bound_s",
        "return False",
        (
            "worker/test_step_watch.py::test_the_first_step_may_build_kernels",
            "worker/test_step_watch.py::test_the_bound_follows_what_steps_of_that_size_take",
        ),
    ),
    Mutant(
        "what is overdue is dropped by the worker",
        BASE,
        "if now >= one.deadline]",
        "if False]",
        (
            "worker/test_deadlines.py::test_queued_work_is_dropped_without_a_step",
            "worker/test_deadlines.py::test_a_prompt_is_given_up_between_two_chunks",
        ),
    ),
    Mutant(
        "what is left after a drain's grace is handed back",
        BASE,
        "if self._drain_by is not None and now >= self._drain_by:",
        "if False:",
        ("worker/test_drain.py::test_what_is_left_when_the_grace_is_over_is_handed_back",),
    ),
    Mutant(
        "a tenant's cached blocks go only while no other has more",
        "kvrelay/engine/cached_blocks.py",
        "count, owner = self._by_count[0]",
        "count, owner = max(self._by_count)",
        ("engine/test_blocks.py::test_one_tenant_cannot_flush_what_another_has_cached_within_its_share",),
    ),
    Mutant(
        "a successor is ready before the worker that is restarted drains",
        "autoscaler/actuator.py",
        "if leaving is not None and len(ready) > size:",
        "if leaving is not None:",
        ("autoscaler/test_actuator.py::test_a_restart_goes_worker_by_worker_and_the_successor_comes_first",),
    ),
    Mutant(
        "seats are bounded",
        DECODE,
        "        if full:",
        "        if False:",
        ("worker/test_relay.py::test_seats_are_refused_when_all_are_taken",),
    ),
    Mutant(
        "blocks of a sequence that is computed on are kept until the step is over",
        "decode_worker/scheduler.py",
        "if not sequence.in_flight:\n            sequence.drop_blocks(self._cache)",
        "sequence.drop_blocks(self._cache)",
        ("decode_worker/test_decode_scheduler.py::test_blocks_of_a_step_in_flight_are_kept_until_it_is_over",),
    ),
    Mutant(
        "free and held make the total",
        BLOCKS,
        '("lost", set(range(self.num_blocks)) - free - held - cached),\n',
        "",
        ("engine/test_blocks.py::test_integrity_check_says_what_is_off",),
    ),
    Mutant(
        "free blocks are those that are counted",
        BLOCKS,
        "if len(free) != self.num_free:",
        "if False:",
        ("engine/test_blocks.py::test_integrity_check_says_what_is_off",),
    ),
    Mutant(
        "a block that nobody holds is not given back",
        BLOCKS,
        'raise IntegrityError(f"release of block {block}, which nobody holds")',
        "pass",
        ("engine/test_blocks.py::test_a_block_is_given_back_once",),
    ),
    Mutant(
        "an idle worker checks its books and says what is off",
        BASE,
        "self._integrity_error = str(error)",
        "pass",
        ("worker/test_books.py::test_a_worker_whose_books_are_off_says_so",),
    ),
    Mutant(
        "preemption keeps the oldest",
        "decode_worker/scheduler.py",
        "youngest = self._active.pop()",
        "youngest = self._active.pop(0)",
        ("decode_worker/test_decode_scheduler.py::test_when_blocks_run_out_the_youngest_is_preempted_and_comes_back",),
    ),
    Mutant(
        "the last token is computed again on a full cache hit",
        "kvrelay/worker/sequence.py",
        "self.blocks = cache.match(self.hasher.extend(self.tokens), len(self.tokens) - 1)",
        "self.blocks = cache.match(self.hasher.extend(self.tokens), len(self.tokens))",
        ("worker/test_sequence.py::test_a_prefix_never_covers_the_whole_sequence",),
    ),
    Mutant(
        "draws are keyed by position",
        "kvrelay/engine/draw.py",
        "[len(request.token_ids) for request in requests]",
        "[0 for request in requests]",
        (
            "engine/test_sampling.py::test_draws_differ_by_seed_and_by_position_and_repeat",
            "engine/test_sampling.py::test_known_draws",
        ),
    ),
    Mutant(
        "draws are keyed by seed",
        "kvrelay/engine/draw.py",
        "uniform([one.seed or 0 for one in params]",
        "uniform([0 for one in params]",
        ("engine/test_sampling.py::test_draws_differ_by_seed_and_by_position_and_repeat",),
    ),
    Mutant(
        "salt in the names of prefix blocks",
        "kvrelay/engine/hashing.py",
        "xxhash.xxh3_64_intdigest(salt.encode())",
        'xxhash.xxh3_64_intdigest(b"")',
        (
            "worker/test_sequence.py::test_another_tenant_finds_nothing",
            "worker/test_prefix_fetch.py::test_another_tenants_blocks_are_not_found",
        ),
    ),
    Mutant(
        "a block's name covers the blocks before it",
        "kvrelay/engine/hashing.py",
        "parent = self.hashes[-1] if self.hashes else self._root",
        "parent = self._root",
        ("engine/test_cache.py::test_a_block_is_not_found_after_other_blocks",),
    ),
    Mutant(
        "a worker is stopped only when it is empty",
        "autoscaler/actuator.py",
        'info.state == "draining" and info.load.empty:',
        'info.state == "draining":',
        ("autoscaler/test_actuator.py::test_the_emptiest_is_drained_and_stopped_only_when_it_is_empty",),
    ),
    Mutant(
        "a worker is empty for good once it says that it drains",
        "autoscaler/actuator.py",
        'info.state == "draining" and info.load.empty:',
        "info.load.empty:",
        ("autoscaler/test_actuator.py::test_empty_is_not_enough_before_the_worker_says_that_it_drains",),
    ),
    Mutant(
        "a rank that has ended is told of",
        "kvrelay/engine/ranks/group.py",
        "if (code := process.poll()) is not None:",
        "if (code := 0):",
        ("engine/test_ranks.py::test_long_steps_layers_and_the_death_of_a_rank",),
    ),
)
