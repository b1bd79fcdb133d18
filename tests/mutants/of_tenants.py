"""Safeguards between tenants: who waits, who gives way, and what stands in for it."""

from __future__ import annotations

from mutants.mutant import Mutant

PREEMPTION = "router/core/queueing/preemption.py"
DISPATCHER = "router/core/dispatcher.py"
PLACEMENT = "router/core/placement.py"
REQUESTS = "router/core/request_table.py"
QUEUE = "router/core/queueing/fair_queue.py"
SLOTS_TESTS = "unit/router/core/queueing/test_batch_slots.py"

MUTANTS = (
    Mutant(
        "clients cannot say that guidance was tried out",
        "kvrelay/wire/sampling.py",
        "return Guidance(cast(GuidanceKind, kind), getattr(message, kind))",
        "return Guidance(cast(GuidanceKind, kind), getattr(message, kind), message.tried_with)",
        (
            "unit/wire/test_inference_wire.py::"
            "test_only_components_of_the_cluster_say_that_guidance_was_tried_out",
        ),
    ),
    Mutant(
        "no tenant sees by the time of a check that another uses a grammar",
        "router/frontend/guidance_check.py",
        'f"{len(salt)} {salt} {guidance.kind} {guidance.source}"',
        'f"{guidance.kind} {guidance.source}"',
        (
            "unit/router/frontend/test_guidance_check.py::"
            "test_who_has_another_salt_does_not_see_by_the_time_that_a_grammar_is_known",
        ),
    ),
    Mutant(
        "no tenant sees by the time of its first token that another uses a grammar",
        "kvrelay/worker/guided_starts.py",
        "spec.sampling.guidance, spec.token_ids, spec.prompt_len, spec.salt",
        "spec.sampling.guidance, spec.token_ids, spec.prompt_len",
        ("unit/worker/test_guided_workers.py::test_grammars_are_compiled_for_each_salt",),
    ),
    Mutant(
        "a tenant's limit bounds the thinking budget",
        "router/frontend/validation.py",
        "for one in (asked, most) if one is not None",
        "for one in (asked,) if one is not None",
        ("unit/router/api/http/test_thinking_budget.py::test_a_tenants_limit_bounds_the_budget",),
    ),
    Mutant(
        "requests of a tenant above its share give way",
        PLACEMENT,
        "placed = [] if decision.no_worker else self._preempt(heads, now)",
        "placed = []",
        (
            f"{SLOTS_TESTS}::test_short_requests_do_not_wait_for_the_end_of_long_answers_of_others",
            f"{SLOTS_TESTS}::test_tenants_that_wait_hold_their_weighted_share",
            "simulation/test_hostile_tenant.py::test_a_tenant_that_fills_the_batch_does_not_keep_others_out",
        ),
    ),
    Mutant(
        "a move is never reversed",
        PREEMPTION,
        "if shares.of(one.tenant, -1, -one.held_tokens) >= mine:",
        "if shares.of(one.tenant) >= mine:",
        ("unit/router/core/queueing/test_preemption.py::test_whatever_the_books_say",),
    ),
    Mutant(
        "a request that was preempted gets on before it is again",
        PREEMPTION,
        "return not self.preemptions or self._ran(MIN_RUN_S)",
        "return True",
        (
            "unit/router/core/queueing/test_preemption.py::test_who_was_preempted_stays_until_it_has_got_on",
        ),
    ),
    Mutant(
        "slots that cannot be shared are taken in turns",
        PREEMPTION,
        "return empty_handed and",
        "return False and",
        (
            "unit/router/core/queueing/test_preemption.py::test_one_slot_is_taken_in_turns_by_who_was_served_less",
            f"{SLOTS_TESTS}::test_slots_that_cannot_be_shared_are_taken_in_turns",
        ),
    ),
    Mutant(
        "nobody gives way where a slot comes free soon",
        PREEMPTION,
        "if only_slots and min(one.soon_s for one, _ in plans) <= restart_s:",
        "if False:",
        (
            "unit/router/core/queueing/test_preemption.py::test_a_slot_that_comes_free_soon_is_waited_for",
        ),
    ),
    Mutant(
        "nobody waits long to spare a restart",
        PREEMPTION,
        "min(SPARED_WAIT_S, max(one.start_s or 0.0 for one in victims))",
        "max(one.start_s or 0.0 for one in victims)",
        (
            "unit/router/core/queueing/test_preemption.py::test_a_restart_that_takes_long_is_not_spared_by_a_long_wait",
        ),
    ),
    Mutant(
        "admissions are slices of the event loop's rounds",
        "router/frontend/frontend.py",
        "await self._slices.run(admitted.tenant, steps())",
        "list(steps())",
        (
            "unit/router/frontend/test_frontend.py::test_requests_of_one_moment_are_admitted_a_few_in_each_round",
        ),
    ),
    Mutant(
        "clients that leave without an answer are charged",
        "router/api/http/connections/pacing.py",
        "if not (served or poll):",
        "if False:",
        ("unit/router/api/test_pacing.py::test_clients_that_leave_before_an_answer_are_charged",),
    ),
    Mutant(
        "a tenant takes no slot that it would have to give back",
        QUEUE,
        "return [one for one in shares if one.running / one.tenant.weight < least]",
        "return shares",
        (
            "unit/router/core/queueing/test_fair_queue.py::test_a_tenant_takes_no_slot_that_it_would_have_to_give_back",
            f"{SLOTS_TESTS}::test_slots_do_not_go_to_and_fro",
        ),
    ),
    Mutant(
        "who was preempted does not take its slot back",
        REQUESTS,
        "returned = entry.begun is not None and not preempted",
        "returned = entry.begun is not None",
        (f"{SLOTS_TESTS}::test_slots_do_not_go_to_and_fro",),
    ),
    Mutant(
        "who was preempted goes first among its tenant's",
        QUEUE,
        "                    _to_front(line, ticket)\n",
        "                    pass\n",
        (
            "unit/router/core/queueing/test_fair_queue.py::test_who_was_preempted_goes_first_among_its_tenants_only",
        ),
    ),
    Mutant(
        "who was preempted is not sent away",
        QUEUE,
        "(one for one in newest if one.request_id not in self._preempted)",
        "newest",
        ("unit/router/core/queueing/test_fair_queue.py::test_who_was_preempted_is_not_sent_away",),
    ),
    Mutant(
        "a withdrawn prefix is not the beginning of published blocks",
        "kvrelay/engine/kvcache/kv_cache.py",
        "        if not before:\n            return\n",
        "        assert before\n",
        (
            "unit/decode_worker/test_scheduler.py::test_a_sequence_goes_on_when_its_prefix_is_withdrawn",
        ),
    ),
    Mutant(
        "blocks of an export wake a prompt",
        "kv_transfer/prefix_export.py",
        "            self._on_release()\n",
        "",
        ("unit/worker/test_waiting_prompts.py::test_blocks_of_an_export_wake_a_prompt",),
    ),
    Mutant(
        "a reservation leaves the blocks that a waiting prompt needs",
        "decode_worker/decode_stage.py",
        "missing + self.scheduler.units_awaited(spec.priority) >",
        "missing >",
        (
            "unit/worker/test_waiting_prompts.py::test_a_reservation_does_not_take_the_blocks_that_a_waiting_prompt_needs",
        ),
    ),
    Mutant(
        "the queue skips a tenant with max_running requests",
        QUEUE,
        "if one.lines and not one.capped]",
        "if one.lines]",
        (
            "unit/router/core/queueing/test_fair_queue.py::test_a_tenant_has_no_more_workers_at_one_time_than_it_may",
        ),
    ),
    Mutant(
        "a worker that has not got its blocks back costs no second victim",
        "router/core/workers/worker_table.py",
        "if worker.refusals < REFUSALS or now < worker.preempted_at + PREEMPT_AGAIN_S:",
        "if False:",
        (f"{SLOTS_TESTS}::test_a_refused_successor_costs_no_second_victim",),
    ),
    Mutant(
        "a prompt takes its tenant's part of a prefill worker",
        "kvrelay/worker/tenant_order.py",
        "self._counters[tenant] += tokens / sequence.weight",
        "pass",
        (
            "unit/prefill_worker/test_scheduler.py::"
            "test_a_short_prompt_does_not_wait_for_the_end_of_another_tenants_long_ones",
            "unit/prefill_worker/test_scheduler.py::test_prompts_of_tenants_that_wait_are_computed_by_weight",
            "unit/decode_worker/test_scheduler.py::test_a_local_prompt_does_not_wait_for_the_end_of_another_tenants",
        ),
    ),
    Mutant(
        "idle time of a tenant earns no credit on a worker",
        "kvrelay/worker/tenant_order.py",
        "self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._virtual)",
        "self._counters.setdefault(tenant, 0.0)",
        (
            "unit/prefill_worker/test_scheduler.py::test_prompts_of_tenants_that_wait_are_computed_by_weight",
        ),
    ),
    Mutant(
        "the tenant with most blocks gives way",
        "decode_worker/scheduler.py",
        "return blocks[sequence.spec.tenant] / sequence.weight, place",
        "return 0.0, place",
        (
            "unit/decode_worker/test_scheduler.py::test_when_blocks_run_out_the_tenant_that_has_most_gives_way",
        ),
    ),
    Mutant(
        "each choice counts as a request",
        "router/api/http/choices.py",
        "named, tenant, completion.n, completion.chat_options",
        "named, tenant, 1, completion.chat_options",
        ("unit/router/api/test_endpoints.py::test_each_choice_counts_as_a_request",),
    ),
    Mutant(
        "tokens that are computed again are charged",
        DISPATCHER,
        "request.priority, life.num_tokens)",
        "request.priority, len(request.token_ids))",
        (f"{SLOTS_TESTS}::test_tokens_that_the_client_has_already_are_charged_as_the_prompt_is",),
    ),
    Mutant(
        "many servers take calls from a gRPC port",
        "router/api/grpc/listener.py",
        "MAX_SERVERS = 64",
        "MAX_SERVERS = 1",
        (
            "unit/router/api/grpc/test_listener.py::"
            "test_calls_of_one_connection_do_not_wait_for_all_those_of_others",
        ),
    ),
    Mutant(
        "gRPC's threads have less priority than the event loop",
        "router/api/grpc/listener.py",
        "        lower_priority()\n",
        "",
        (
            "unit/router/api/grpc/test_listener.py::"
            "test_the_event_loop_has_more_of_a_core_than_the_reading_of_a_flood",
        ),
    ),
    Mutant(
        "calls that have ended do not count as open",
        "router/api/grpc/listener.py",
        '("grpc.http2.max_deallocating_streams", MAX_STREAMS),',
        "",
        (
            "unit/router/api/grpc/test_listener.py::"
            "test_a_client_may_begin_any_number_of_calls_on_one_connection",
        ),
    ),
    Mutant(
        "a gRPC port belongs to one router",
        "router/api/grpc/listener.py",
        "if not is_shared:",
        "if False:",
        ("unit/router/api/grpc/test_listener.py::test_two_routers_do_not_share_a_port",),
    ),
    Mutant(
        "few polls of a tenant wait",
        "router/frontend/waiting_room.py",
        "if not wait_s or (poll and waiting[name] >= MAX_POLLS):",
        "if not wait_s:",
        ("unit/router/api/test_pacing.py::test_few_polls_of_a_tenant_wait",),
    ),
    Mutant(
        "gRPC does not look far ahead into messages that nobody reads",
        "router/api/grpc/listener.py",
        '("grpc.http2.bdp_probe", 0),',
        "",
        ("unit/router/api/grpc/test_bounds.py::test_a_message_without_a_slot_is_not_received",),
    ),
    Mutant(
        "an interrupt ends no thread that reads for other calls",
        "kvrelay/client/base_client.py",
        "(ChannelOptions.SingleThreadedUnaryStream, 1),",
        "",
        ("unit/client/test_interrupts.py::test_a_client_answers_after_an_interrupt_at_any_moment",),
    ),
    Mutant(
        "an interrupt ends the use of its channel",
        "kvrelay/client/base_client.py",
        "self._channels = [] raise",
        "raise",
        ("unit/client/test_interrupts.py::test_a_client_answers_after_an_interrupt_at_any_moment",),
    ),
)
