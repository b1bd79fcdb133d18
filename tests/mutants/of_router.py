"""Safeguards of the router: token order, attempts, deadlines, poison requests, bounds."""

from __future__ import annotations

from mutants.mutant import Mutant

LIFECYCLE = "router/core/lifecycle.py"
DISPATCHER = "router/core/dispatcher.py"
PLACEMENT = "router/core/placement.py"
REQUESTS = "router/core/request_table.py"
SESSIONS = "router/runtime/sessions.py"

MUTANTS = (
    Mutant(
        "tokens that came before are dropped",
        LIFECYCLE,
        "new = slice(start - event.index,",
        "new = slice(0,",
        (
            "unit/router/core/test_lifecycle.py::test_duplicates_show_nothing",
            "unit/router/core/test_lifecycle.py::test_logprobs_stay_with_their_tokens_when_duplicates_fall_away",
        ),
    ),
    Mutant(
        "tokens beyond max_tokens are dropped",
        LIFECYCLE,
        "if start != event.index or start + len(token_ids) > self.request.sampling.max_tokens:",
        "if start != event.index:",
        (
            "unit/router/core/test_lifecycle.py::test_answer_ends_at_max_tokens_though_the_worker_goes_on",
        ),
    ),
    Mutant(
        "a gap in the tokens",
        LIFECYCLE,
        "if event.index > len(self.tokens):",
        "if False:",
        ("unit/router/core/test_lifecycle.py::test_a_gap_is_given_to_another_attempt",),
    ),
    Mutant(
        "attempt number of events",
        LIFECYCLE,
        "return part and attempt == self.attempt and not self.ended",
        "return part and not self.ended",
        (
            "unit/router/core/test_lifecycle.py::test_events_of_an_attempt_that_was_given_up_are_dropped",
            "unit/router/core/test_dispatcher.py::test_new_epoch_of_a_worker_means_that_the_old_one_is_lost",
        ),
    ),
    Mutant(
        "events of workers that are not part of it",
        LIFECYCLE,
        "return part and attempt == self.attempt and not self.ended",
        "return placed is not None and attempt == self.attempt and not self.ended",
        ("unit/router/core/test_lifecycle.py::test_events_of_strangers_are_dropped",),
    ),
    Mutant(
        "one end for each request",
        LIFECYCLE,
        "return part and attempt == self.attempt and not self.ended",
        "return part and attempt == self.attempt",
        (
            "unit/router/core/test_lifecycle.py::test_duplicate_of_the_last_tokens_does_not_end_it_twice",
        ),
    ),
    Mutant(
        "a request that kills its workers is quarantined",
        LIFECYCLE,
        "if self.crashes.is_poison:\n                error",
        "if False:\n                error",
        (
            "unit/router/core/test_lifecycle.py::test_request_that_kills_two_workers_is_not_given_a_third",
        ),
    ),
    Mutant(
        "attempts are bounded",
        LIFECYCLE,
        "if self.failures >= self._settings.max_attempts:",
        "if False:",
        (
            "unit/router/core/test_lifecycle.py::test_attempts_are_bounded_and_the_last_error_is_told",
        ),
    ),
    Mutant(
        "a lost attempt is aborted on the worker that is left",
        LIFECYCLE,
        "return [Send(holder, abort) for holder in self.holders if holder != gone]",
        "return []",
        (
            "unit/router/core/test_lifecycle.py::test_loss_of_a_worker_frees_the_other_and_tries_again",
            "unit/router/core/test_lifecycle.py::test_cancel_in_each_state",
        ),
    ),
    Mutant(
        "the like of a request that killed workers is refused",
        "router/core/workers/quarantine.py",
        "if until is not None:",
        "if False:",
        (
            "unit/router/core/workers/test_quarantine.py::test_the_like_of_it_is_refused_for_a_while_and_told_how_long",
        ),
    ),
    Mutant(
        "retries are paid for",
        "router/core/retry_budget.py",
        "if self._balance < 1:",
        "if False:",
        ("unit/router/core/test_retry_budget.py::test_a_quiet_cluster_can_fail_over",),
    ),
    Mutant(
        "suspects run one at a time",
        PLACEMENT,
        "if not crashes.suspected:\n            return False",
        "return False",
        (
            "unit/router/core/test_dispatcher.py::test_suspects_run_one_at_a_time",
            "unit/router/core/test_dispatcher.py::test_suspect_that_waits_for_its_lease_is_still_alone",
        ),
    ),
    Mutant(
        "deadline",
        DISPATCHER,
        "for entry in list(self._entries.values()):\n            if now >= "
        "entry.life.request.deadline:",
        "for entry in list(self._entries.values()):\n            if False:",
        (
            "unit/router/core/test_dispatcher.py::test_deadline_of_a_request_that_runs",
            "unit/router/test_end_to_end.py::test_deadline_on_a_worker_that_hangs",
        ),
    ),
    Mutant(
        "a deadline that has passed already",
        "router/frontend/frontend.py",
        "if time_left is not None and time_left <= 0:",
        "if False:",
        (
            "unit/router/frontend/test_frontend.py::test_a_deadline_that_has_passed_is_told_before_anything_is_done",
        ),
    ),
    Mutant(
        "a live request id is not taken twice",
        DISPATCHER,
        "if request.request_id in self._entries:",
        "if False:",
        (
            "unit/router/core/test_dispatcher.py::test_live_request_id_is_not_taken_twice_but_an_ended_one_is",
            "unit/router/test_end_to_end.py::test_live_request_id_twice",
        ),
    ),
    Mutant(
        "the queue is bounded",
        "router/core/admission.py",
        "if not self._queue or len(self._queue) + requests <= self._max_queue:",
        "if True:",
        (
            "unit/router/core/test_dispatcher.py::test_full_queue_refuses",
            "unit/router/test_end_to_end.py::test_full_queue_refuses_the_next",
        ),
    ),
    Mutant(
        "leases are kept alive",
        DISPATCHER,
        "leases.setdefault(life.assignment.decode, []).append(life.lease_id)",
        "pass",
        ("unit/router/core/test_dispatcher.py::test_leases_are_renewed_until_the_commit",),
    ),
    Mutant(
        "news of another epoch are not of this worker",
        "router/core/workers/worker_table.py",
        "if worker is not None and worker.info.epoch == info.epoch:",
        "if worker is not None:",
        ("unit/router/core/test_dispatcher.py::test_news_of_another_epoch_are_not_of_this_worker",),
    ),
    Mutant(
        "a worker's next epoch ends the one before",
        DISPATCHER,
        "effects = self.worker_lost(info.worker_id, now) if info.worker_id in self._workers else "
        "[]",
        "effects: list[Effect] = []",
        (
            "unit/router/core/test_dispatcher.py::test_new_epoch_of_a_worker_means_that_the_old_one_is_lost",
        ),
    ),
    Mutant(
        "epoch of a session",
        SESSIONS,
        "if not isinstance(welcome, Welcome) or (welcome.worker_id, welcome.epoch) != (",
        "if not isinstance(welcome, Welcome) or (welcome.worker_id, self.info.epoch) != (",
        (
            "unit/router/test_end_to_end.py::test_answer_of_a_worker_with_another_epoch_is_not_taken",
        ),
    ),
    Mutant(
        "a draining router takes nothing",
        "router/runtime/driver.py",
        "if self.draining:\n            raise Unavailable(",
        "if False:\n            raise Unavailable(",
        (
            "unit/router/test_end_to_end.py::test_drain_refuses_new_requests_and_lets_the_others_end",
        ),
    ),
    Mutant(
        "the leader's fencing token",
        "kvrelay/state/registry_scripts.py",
        "if leader.err or leader[1] ~= ARGV[1] or leader[2] ~= ARGV[2] then return 0 end\n",
        "",
        (
            "unit/state/test_registry.py::test_scaling_is_fenced_and_never_overrides_an_operator",
            "unit/state/test_registry.py::test_what_a_leader_writes_is_fenced",
        ),
    ),
    Mutant(
        "a term belongs to one owner",
        "kvrelay/state/registry_scripts.py",
        "if leader.err or leader[1] ~= ARGV[1] or leader[2]",
        "if leader.err or leader[2]",
        ("unit/state/test_registry.py::test_scaling_is_fenced_and_never_overrides_an_operator",),
    ),
    Mutant(
        "terms exceed all that anybody knows",
        "kvrelay/state/registry_scripts.py",
        "  term, beat = highest + 1, 0\n",
        "  term, beat = term + 1, 0\n",
        ("unit/state/test_registry.py::test_a_term_exceeds_all_that_anybody_knows",),
    ),
    Mutant(
        "a worker whose controller was succeeded does not register",
        "kvrelay/state/registry_scripts.py",
        "number(leader[2]) >= number(ARGV[4]) then",
        "false then",
        (
            "unit/state/test_registry.py::test_a_worker_that_comes_up_after_its_controller_was_succeeded_is_refused",
            "unit/autoscaler/test_actuator_lease.py::test_starts_that_a_new_leader_does_not_know_of_are_cancelled",
        ),
    ),
    Mutant(
        "a leader stops when it cannot renew",
        "autoscaler/lease.py",
        "return self._acts and self._seconds_left() > 0",
        "return self._acts",
        (
            "unit/autoscaler/test_lease.py::test_a_leader_that_cannot_renew_stops_in_time_and_another_takes_over",
        ),
    ),
    Mutant(
        "a newcomer waits before it acts",
        "autoscaler/lease.py",
        "began - self._held_since >= TAKEOVER_S",
        "True",
        ("unit/autoscaler/test_lease.py::test_who_takes_the_lease_waits_before_it_acts",),
    ),
    Mutant(
        "a newcomer waits anew when its lease was lost",
        "autoscaler/lease.py",
        "if not led and not unbroken:",
        "if not led and not self._held_since:",
        (
            "unit/autoscaler/test_lease.py::test_a_newcomer_begins_to_wait_again_when_its_lease_was_lost",
        ),
    ),
    Mutant(
        "a leader that stopped leads again in a later term only",
        "autoscaler/lease.py",
        "if self._acts and not led:\n",
        "if False:\n",
        ("unit/autoscaler/test_lease.py::test_a_leader_that_stopped_leads_again_in_a_later_term",),
    ),
    Mutant(
        "a deposed leader leads again in a later term only",
        "autoscaler/lease.py",
        "        if self._acts:\n            self._step_down()\n",
        "        self._acts = False\n",
        ("unit/autoscaler/test_lease.py::test_a_deposed_leader_leads_again_in_a_later_term",),
    ),
    Mutant(
        "the autoscaler's look ends with the lease",
        "autoscaler/loop.py",
        "async with self._lease.in_time():\n",
        "if self._lease.leads:\n",
        ("unit/autoscaler/test_loop.py::test_a_poll_ends_with_the_lease",),
    ),
    Mutant(
        "an actuator without the lease does nothing",
        "autoscaler/actuator.py",
        "if self._lease is not None and not self._lease.leads:\n            await self._follow",
        "if False:\n            await self._follow",
        ("unit/autoscaler/test_actuator_lease.py::test_who_does_not_lead_starts_nothing",),
    ),
    Mutant(
        "a new leader counts the workers that run",
        "autoscaler/actuator.py",
        "            self._watch.adopt(infos, self._lease.owner)\n",
        "            pass\n",
        (
            "unit/autoscaler/test_actuator_lease.py::test_a_new_leader_adopts_what_runs_and_replaces_what_is_gone",
        ),
    ),
    Mutant(
        "a size that an operator changed is not overwritten",
        "kvrelay/state/registry_scripts.py",
        "if redis.call('HGET', KEYS[2], ARGV[i]) ~= ARGV[i + 1] then return 0 end\n",
        "",
        ("unit/state/test_registry.py::test_scaling_is_fenced_and_never_overrides_an_operator",),
    ),
    Mutant(
        "one leader at a time",
        "kvrelay/state/registry_scripts.py",
        "if owner ~= ''\n",
        "if false\n",
        ("unit/state/test_registry.py::test_one_leader_at_a_time",),
    ),
    Mutant(
        "an older incarnation does not overwrite a later one",
        "kvrelay/state/registry_scripts.py",
        "epoch > number(ARGV[1]) then return epoch end",
        "false then return epoch end",
        (
            "unit/state/test_registry.py::test_an_older_incarnation_cannot_overwrite_or_remove_a_later_one",
        ),
    ),
    Mutant(
        "epochs go on after Redis has lost them",
        "kvrelay/state/registry_scripts.py",
        "then\n  redis.call('SET', KEYS[2], ARGV[1])\nend",
        "then return end",
        ("unit/state/test_registry.py::test_epochs_stay_unique_after_redis_lost_everything",),
    ),
    Mutant(
        "a sequence fault is no failure that retries are paid for",
        LIFECYCLE,
        "        if event.of_sequence:\n",
        "        if False:\n",
        (
            "unit/router/core/workers/test_sick_workers.py"
            "::test_requests_that_no_worker_has_a_token_for_cost_two_attempts_and_harm_nobody",
        ),
    ),
    Mutant(
        "a sequence fault speaks against no worker by itself",
        DISPATCHER,
        "elif isinstance(event, Failed) and event.of_sequence:",
        "elif False:",
        (
            "unit/router/core/workers/test_sick_workers.py"
            "::test_requests_that_no_worker_has_a_token_for_cost_two_attempts_and_harm_nobody",
        ),
    ),
    Mutant(
        "a sequence fault that another worker corrects is the first one's",
        "router/core/workers/blame.py",
        "if at_fault and at_fault != worker_id and sequence.token_ids:",
        "if False:",
        (
            "unit/router/core/workers/test_sick_workers.py::test_a_worker_that_has_no_token_where_others_have_one_is_blamed",
        ),
    ),
    Mutant(
        "a draining worker continues an answer that no ready worker can continue",
        "router/core/workers/worker_table.py",
        "none_ready = model is not None and not self._decodes(model)",
        "none_ready = False",
        (
            "unit/router/core/test_compatibility.py::"
            "test_a_draining_worker_continues_the_answers_of_a_version_that_no_ready_worker_has",
        ),
    ),
    Mutant(
        "a ready worker of the version comes before a draining one",
        "router/core/workers/worker_table.py",
        "none_ready = model is not None and not self._decodes(model)",
        "none_ready = model is not None",
        (
            "unit/router/core/test_compatibility.py::"
            "test_a_ready_worker_of_the_version_comes_before_a_draining_one",
        ),
    ),
    Mutant(
        "a sequence fault is tried on another worker, or on the local path",
        "router/core/queueing/batch_slots.py",
        "    if not life.fault:",
        "    if True:",
        (
            "unit/router/core/workers/test_sick_workers.py::test_a_worker_that_has_no_token_where_others_have_one_is_blamed",
        ),
    ),
    Mutant(
        "a retry goes to the version of the model that began the answer",
        PLACEMENT,
        "            broken,\n            life.model,",
        "            broken,\n            None,",
        (
            "unit/router/core/test_compatibility.py::test_after_its_first_token_it_waits_for_its_own_while_others_go_on",
        ),
    ),
    Mutant(
        "a request that waits for its version stands in nobody's way",
        PLACEMENT,
        "if missing := limiting(entry.life, self._workers):",
        "if missing := set():",
        (
            "unit/router/core/test_compatibility.py::test_after_its_first_token_it_waits_for_its_own_while_others_go_on",
            "unit/router/core/test_compatibility.py::test_a_resumed_answer_waits_for_its_version_and_blocks_nobody",
        ),
    ),
    Mutant(
        "guidance goes to workers that know it alone",
        "router/core/workers/worker_table.py",
        "or (limited and not follows(info, request.sampling))",
        "",
        (
            "unit/router/core/test_request_demands.py::test_guidance_goes_to_the_worker_that_knows_it_although_the_other_is_idle",
            "unit/router/core/test_request_demands.py::test_an_older_prefill_worker_gets_no_prompt_with_guidance",
        ),
    ),
    Mutant(
        "prompts stay in the queue while prefill workers are busy",
        "router/core/workers/worker_table.py",
        "over = over or not takes_prompt",
        "over = over",
        (
            "unit/router/core/test_late_binding.py::test_a_busy_worker_gets_one_prompt_ahead_and_the_others_hold_no_batch_slot",
            "unit/router/core/test_late_binding.py::test_a_worker_that_joins_takes_from_the_queue_at_once",
        ),
    ),
    Mutant(
        "decode workers help the prefill pool only within their answers' ITL",
        "router/core/path_prediction.py",
        "    if decode.prompt_rate == 0:\n",
        "    if decode.prompt_rate == -1:\n",
        (
            "unit/router/core/test_path_prediction.py::test_no_help",
            "unit/router/core/test_path_prediction.py::test_help_is_a_last_resort_that_costs_no_answer_its_itl",
        ),
    ),
    Mutant(
        "prompts on the local path leave the answers their ITL",
        "decode_worker/chunk_budget.py",
        "        if itl_s is None:\n            self._is_cut",
        "        if True:\n            self._is_cut",
        (
            "unit/decode_worker/test_chunk_budget.py::test_steps_take_the_itl_or_the_least_or_the_most",
            "unit/decode_worker/test_chunk_budget.py::test_a_prompt_leaves_the_answers_their_itl",
        ),
    ),
    Mutant(
        "the first step of a sequence that was handed over keeps its ITL",
        "decode_worker/chunk_budget.py",
        "self._whole_blocks(left * max(wanted, self._given))",
        "self._given",
        (
            "unit/decode_worker/test_chunk_budget.py::test_a_sequence_that_joins_keeps_its_itl_and_prompts_go_on",
            "unit/decode_worker/test_chunk_budget.py::test_the_first_step_after_a_hand_off_has_fewer_prompt_tokens",
        ),
    ),
    Mutant(
        "prompts go on although sequences are handed over in each step",
        "decode_worker/chunk_budget.py",
        "prompts_s <= 0 or self._paused",
        "prompts_s <= 0",
        (
            "unit/decode_worker/test_chunk_budget.py::test_a_sequence_that_joins_keeps_its_itl_and_prompts_go_on",
        ),
    ),
    Mutant(
        "a decode worker that computed no prompt lately is as fast as it was",
        "decode_worker/chunk_budget.py",
        " or self._rate.latest",
        "",
        (
            "unit/decode_worker/test_chunk_budget.py::test_a_rate_that_was_measured_long_ago_counts_with_the_answers_of_now",
        ),
    ),
    Mutant(
        "each hand-off keeps its ITL, also one that comes while another has its first step",
        "decode_worker/scheduler.py",
        "        self.joined_at = None\n        self._grow()",
        "        self._grow()",
        (
            "unit/decode_worker/test_chunk_budget.py::test_the_first_step_after_a_hand_off_has_fewer_prompt_tokens",
        ),
    ),
    Mutant(
        "prompts that wait behind a request count, so that it is helped in time",
        PLACEMENT,
        "outlook_of(common, request.slo, now - request.arrival, ahead)",
        "outlook_of(common, request.slo, now - request.arrival, 0)",
        ("unit/router/core/test_path_prediction.py::test_a_burst_is_helped_at_once",),
    ),
    Mutant(
        "one odd step does not change a worker's rate",
        "kvrelay/worker/steps/prompt_rate.py",
        "median(rate for _, rate in self._steps)",
        "(sum(rate for _, rate in self._steps) / len(self._steps))",
        ("unit/worker/test_prompt_rate.py::test_no_odd_step_changes_the_rate_of_a_steady_worker",),
    ),
    Mutant(
        "requests that need no prefill worker do not wait for one",
        PLACEMENT,
        "                self._queue.defer(ticket)\n                continue",
        "                wait, queued = decision, True\n                break",
        (
            "unit/router/core/test_late_binding.py::test_who_needs_no_prefill_worker_does_not_wait_for_one",
        ),
    ),
    Mutant(
        "later prompts do not overtake those that wait for a prefill worker",
        "router/core/queueing/prefill_gate.py",
        "held = bool(decision.prefill) and self.busy_for(tenant)",
        "held = False",
        ("unit/router/core/test_late_binding.py::test_the_fifth_tenant_is_served_in_its_turn",),
    ),
    Mutant(
        "a request that needs no prefill worker is not judged by those that do",
        DISPATCHER,
        "if request.complete is None and not self._placement.overtakes(entry, now):",
        "if request.complete is None:",
        (
            "unit/router/core/test_late_binding.py::test_a_request_without_need_of_prefill_is_not_judged_by_the_queue_for_it",
        ),
    ),
    Mutant(
        "a long queue is looked through in parts",
        "router/core/queueing/prefill_gate.py",
        "return self._held >= MOST_HELD",
        "return False",
        ("unit/router/core/test_late_binding.py::test_a_long_queue_is_looked_through_in_parts",),
    ),
    Mutant(
        "the queue moves when a prefill worker ends a prompt",
        REQUESTS,
        "if self.workers.prompt_ended(entry.claim, entry.life, now):",
        "if self.workers.prompt_ended(entry.claim, entry.life, now) and False:",
        (
            "unit/router/core/test_late_binding.py::test_a_prompt_that_ends_makes_room_for_the_next_at_once",
        ),
    ),
    Mutant(
        "a version that is gone for good",
        "router/core/model_versions.py",
        "return now - entry.lone_since >= GONE_S",
        "return False",
        (
            "unit/router/core/test_compatibility.py::test_a_version_that_is_gone_for_good_ends_its_requests_with_a_reason",
        ),
    ),
    Mutant(
        "a resumed answer of another version",
        "router/core/model_versions.py",
        "if workers.any_decodes and not workers.serves(model):\n        raise",
        "if False:\n        raise",
        (
            "unit/router/core/test_compatibility.py::test_a_resumed_answer_is_refused_at_another_version",
            "unit/router/core/test_compatibility.py::test_clients_are_told_the_version_and_held_to_it",
        ),
    ),
    Mutant(
        "prefill and decode of one version",
        "router/core/path_policy.py",
        "alike = [one for one in workers if one.model.is_same(decode.model)]",
        "alike = list(workers)",
        (
            "unit/router/core/test_compatibility.py::test_all_workers_of_an_attempt_have_one_version",
        ),
    ),
    Mutant(
        "an impossible value fails its own sequence",
        "kvrelay/wire/events.py",
        "    except InvalidArgument as error:\n        if kind ==",
        "    except ZeroDivisionError as error:\n        if kind ==",
        (
            "unit/router/runtime/test_odd_events.py::test_an_odd_event_is_its_own_requests_trouble",
            "unit/router/runtime/test_odd_events.py::test_a_worker_hears_that_its_tokens_were_of_no_use",
        ),
    ),
    Mutant(
        "a worker whose protocol or vocabulary does not fit",
        "router/runtime/driver.py",
        "if info.worker_id in self._misfits:",
        "if False:",
        (
            "unit/router/runtime/test_odd_events.py::test_a_worker_with_another_vocabulary_is_shown_and_left_alone",
        ),
    ),
    Mutant(
        "gRPC leaves child processes alone",
        "kvrelay/cli/main.py",
        'os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"',
        'os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "1"',
        ("unit/cli/test_child_processes.py::test_grpc_starts_no_threads_in_children",),
    ),
    Mutant(
        "chat templates are warm before a router is ready",
        "router/frontend/tokenization.py",
        "await _warm(self._idle[-1])",
        "pass",
        (
            "unit/router/frontend/test_tokenization.py::test_after_the_warm_up_a_chat_starts_no_process",
        ),
    ),
)
