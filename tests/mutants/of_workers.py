"""Safeguards of the workers and their engine: commands once, blocks accounted for, draws by
position, tenants apart.
"""

from __future__ import annotations

from mutants.mutant import Mutant

WORKER = "kvrelay/worker/worker.py"
HASHING = "kvrelay/engine/kvcache/block_hashes.py"
BLOCKS = "kvrelay/engine/kvcache/block_pool.py"
DECODE = "decode_worker/decode_stage.py"
FOLDER = "kvrelay/process/owned_folder.py"
REPLICA_TESTS = "unit/router/core/prefixes/test_cache_replica.py"


MUTANTS = (
    Mutant(
        "workers that keep dying before one has served end the cluster",
        "kvrelay/launch/failed_start.py",
        "if self._deaths < MOST_DEATHS:",
        "if True:",
        ("unit/launch/test_failed_start.py::test_what_another_start_may_cure_is_tried_some_times",),
    ),
    Mutant(
        "a controller is started again once the machine can start processes",
        "kvrelay/launch/child_supervisor.py",
        "except OSError as error:",
        "except ZeroDivisionError as error:",
        ("unit/launch/test_child_supervisor.py::test_it_backs_off_until_a_process_can_be_started",),
    ),
    Mutant(
        "an error that each start repeats ends the cluster",
        "kvrelay/launch/failed_start.py",
        "if failed.error is not None:",
        "if False:",
        ("unit/launch/test_failed_start.py::test_what_comes_back_with_each_start_ends_the_first",),
    ),
    Mutant(
        "what has served is replaced whatever it died of",
        "kvrelay/launch/model_controller.py",
        "None if actuator.has_served else starts.verdict(failed)",
        "starts.verdict(failed)",
        ("unit/launch/test_failed_start.py::test_what_has_served_is_replaced_whatever_it_died_of",),
    ),
    Mutant(
        "weights that are cut short are seen before anything starts",
        "kvrelay/models/model_files.py",
        "    if size != wanted:",
        "    if False:",
        ("unit/models/test_model_files.py::test_weights_that_are_cut_short_anywhere",),
    ),
    Mutant(
        "a lock on a lock file that has been removed does not count",
        FOLDER,
        "return is_open_at(lock, path)",
        "return True",
        (
            "unit/process/test_owned_folder.py"
            "::test_creators_and_sweepers_do_not_disturb_each_other",
        ),
    ),
    Mutant(
        "a lock file stays as long as its folder",
        FOLDER,
        "if not os.path.lexists(folder):",
        "if True:",
        (
            "unit/process/test_owned_folder.py::test_a_folder_that_cannot_be_removed_is_removed_later",
        ),
    ),
    Mutant(
        "folders of processes that were killed are removed",
        FOLDER,
        "        remove_abandoned_folders(parent)",
        "        pass",
        (
            "unit/process/test_owned_folder.py"
            "::test_the_folder_of_a_killed_owner_is_removed_by_the_next_owner",
        ),
    ),
    Mutant(
        "a command that is repeated is run once",
        WORKER,
        "if key in self.context.sessions:",
        "if False:",
        (
            "unit/worker/test_relay.py::test_a_repeated_command_is_run_once",
            "unit/worker/test_relay.py::test_a_repeated_prefill_is_run_once",
        ),
    ),
    Mutant(
        "a reservation that is repeated gets the same answer",
        DECODE,
        "            session.send(self._reserved[key][1])",
        "            pass",
        ("unit/worker/test_relay.py::test_a_repeated_command_is_run_once",),
    ),
    Mutant(
        "a request of another router by the same name",
        WORKER,
        "return self.context.sessions.get(key, session) is session",
        "return True",
        ("unit/worker/test_blame.py::test_routers_with_requests_of_one_name_do_not_meet",),
    ),
    Mutant(
        "when a router goes its sequences go",
        WORKER,
        "for key in [key for key, owner in sessions.items() if owner is session]:",
        "for key in ():",
        ("unit/worker/test_relay.py::test_when_a_router_goes_its_sequences_go",),
    ),
    Mutant(
        "a sequence that does not fit is refused by the worker",
        "kvrelay/worker/sequence_check.py",
        "if not 0 < length < max_model_len:",
        "if not 0 < length:",
        (
            "unit/worker/test_relay.py::test_a_prompt_past_the_context_is_refused_by_the_worker_itself",
        ),
    ),
    Mutant(
        "a token that the model does not have is refused by the worker",
        "kvrelay/worker/sequence_check.py",
        "if not 0 <= min(spec.token_ids) <= max(spec.token_ids) < vocab_size:",
        "if False:",
        ("unit/worker/test_sequence_check.py::test_what_a_model_cannot_run_is_refused",),
    ),
    Mutant(
        "a commit is for the sequence as it is",
        DECODE,
        "if num_tokens != expected or not 0 <= first_token < runner.vocab_size:",
        "if False:",
        (
            "unit/decode_worker/test_worker.py::test_a_commit_of_something_else_ends_the_attempt_and_harms_nobody",
        ),
    ),
    Mutant(
        "a worker that drains, starts or is stuck takes nothing",
        WORKER,
        'if state != "ready" and not continues:',
        "if False:",
        (
            "unit/decode_worker/test_worker.py::test_a_draining_worker_refuses_and_becomes_empty",
            "unit/worker/test_liveness.py::test_a_worker_is_given_no_work_before_its_first_real_steps",
        ),
    ),
    Mutant(
        "a step that hangs ends its worker",
        "kvrelay/worker/steps/step_watch.py",
        "return self.age_s > self.bound_s",
        "return False",
        (
            "unit/worker/test_step_watch.py::test_the_first_step_may_build_kernels",
            "unit/worker/test_step_watch.py::test_the_bound_follows_what_steps_of_that_size_take",
        ),
    ),
    Mutant(
        "what is overdue is dropped by the worker",
        WORKER,
        "if now >= sequence.deadline\n",
        "if False\n",
        (
            "unit/worker/test_deadlines.py::test_queued_work_is_dropped_without_a_step",
            "unit/worker/test_deadlines.py::test_a_prompt_is_given_up_between_two_chunks",
        ),
    ),
    Mutant(
        "what is left after a drain's grace is handed back",
        WORKER,
        "if self._drain.over:",
        "if False:",
        ("unit/worker/test_drain.py::test_what_is_left_when_the_grace_is_over_is_handed_back",),
    ),
    Mutant(
        "a draining worker continues answers that have begun",
        WORKER,
        'continues = state == "draining" and spec.num_emitted > 0',
        'continues = state == "draining" and spec.num_emitted < 0',
        ("unit/worker/test_drain.py::test_an_answer_that_has_begun_is_continued_within_the_grace",),
    ),
    Mutant(
        "a draining worker stays for the rest of an abandoned answer",
        "kvrelay/worker/drain.py",
        "self._abandoned_at = self._clock.now()",
        "pass",
        (
            "unit/worker/test_drain.py::"
            "test_the_worker_stays_a_while_for_the_rest_of_an_abandoned_answer",
        ),
    ),
    Mutant(
        "a tenant's cached blocks go only while no other has more",
        "kvrelay/engine/kvcache/block_eviction.py",
        "count, owner = self._by_count[0]",
        "count, owner = max(self._by_count)",
        (
            "unit/engine/kvcache/test_block_pool.py::test_one_tenant_cannot_flush_what_another_has_cached_within_its_share",
        ),
    ),
    Mutant(
        "a successor is ready before the worker that is restarted drains",
        "autoscaler/actuator.py",
        "if leaving is not None and len(ready) > size:",
        "if leaving is not None:",
        (
            "unit/autoscaler/test_actuator.py::test_a_restart_goes_worker_by_worker_and_the_successor_comes_first",
        ),
    ),
    Mutant(
        "slots are bounded",
        DECODE,
        "if self._is_full(spec.key):",
        "if False:",
        ("unit/worker/test_relay.py::test_slots_are_refused_when_all_are_taken",),
    ),
    Mutant(
        "blocks of a sequence that is computed on are kept until the step is over",
        "kvrelay/worker/scheduler.py",
        "if not sequence.in_flight:\n            sequence.drop_blocks(self._cache)",
        "sequence.drop_blocks(self._cache)",
        (
            "unit/decode_worker/test_scheduler.py::test_blocks_of_a_step_in_flight_are_kept_until_it_is_over",
        ),
    ),
    Mutant(
        "free and held make the total",
        BLOCKS,
        '("lost", set(range(self.num_blocks)) - free - held - cached),\n',
        "",
        ("unit/engine/kvcache/test_block_pool.py::test_integrity_check_says_what_is_off",),
    ),
    Mutant(
        "free blocks are those that are counted",
        BLOCKS,
        "if len(free) != self.num_free:",
        "if False:",
        ("unit/engine/kvcache/test_block_pool.py::test_integrity_check_says_what_is_off",),
    ),
    Mutant(
        "a block that nobody holds is not given back",
        BLOCKS,
        'raise IntegrityError(f"block {block} is released, but no sequence holds it")',
        "pass",
        ("unit/engine/kvcache/test_block_pool.py::test_a_block_is_given_back_once",),
    ),
    Mutant(
        "an idle worker checks its books and says what is off",
        "kvrelay/worker/heartbeat.py",
        "self._integrity_error = str(error)",
        "pass",
        ("unit/worker/test_books.py::test_a_worker_whose_books_are_off_says_so",),
    ),
    Mutant(
        "preemption keeps the oldest",
        "decode_worker/scheduler.py",
        "return max(others, key=excess, default=0)",
        "return 0",
        (
            "unit/decode_worker/test_scheduler.py::test_when_blocks_run_out_the_youngest_is_preempted_and_comes_back",
        ),
    ),
    Mutant(
        "the last token is computed again on a full cache hit",
        "kvrelay/worker/sequence.py",
        "most = len(self.tokens) - 1",
        "most = len(self.tokens)",
        ("unit/worker/test_sequence.py::test_a_prefix_never_covers_the_whole_sequence",),
    ),
    Mutant(
        "a selection goes on with what the larger digits left of the target",
        "kvrelay/engine/sampling/radix_select.py",
        "remaining = remaining - np.pad(",
        "remaining = remaining - 0 * np.pad(",
        (
            "unit/engine/sampling/test_radix_select.py::test_selects_what_a_sort_finds",
            "unit/engine/sampling/test_sampler.py::test_a_batch_gives_each_row_what_it_is_given_alone_by_definition",
        ),
    ),
    Mutant(
        "draws are keyed by position",
        "kvrelay/engine/sampling/categorical.py",
        "[len(request.token_ids) for request in requests]",
        "[0 for request in requests]",
        (
            "unit/engine/sampling/test_sampler.py::test_draws_differ_by_seed_and_by_position_and_repeat",
            "unit/engine/sampling/test_sampler.py::test_known_draws",
        ),
    ),
    Mutant(
        "draws are keyed by seed",
        "kvrelay/engine/sampling/categorical.py",
        "uniform([params.seed or 0 for params in options]",
        "uniform([0 for params in options]",
        (
            "unit/engine/sampling/test_sampler.py::test_draws_differ_by_seed_and_by_position_and_repeat",
        ),
    ),
    Mutant(
        "block hashes are keyed by model and salt",
        HASHING,
        "HashChain(hashlib.blake2b(key=key, digest_size=hash_bytes))",
        "HashChain(hashlib.blake2b(digest_size=hash_bytes))",
        (
            "unit/engine/kvcache/test_kv_cache.py::test_hashes_are_of_all_tokens_before_and_of_the_salt",
            "unit/engine/kvcache/test_kv_cache.py::test_hashes_are_of_the_model",
        ),
    ),
    Mutant(
        "a block's hash covers the blocks before it",
        HASHING,
        "state.update(tokens)",
        "state = hashlib.blake2b(tokens, digest_size=16)",
        (
            "unit/engine/kvcache/test_kv_cache.py::test_hashes_are_of_all_tokens_before_and_of_the_salt",
        ),
    ),
    Mutant(
        "block hashes have 128 bits",
        HASHING,
        "HASH_BYTES = 16",
        "HASH_BYTES = 8",
        (
            "unit/engine/kvcache/test_kv_cache.py::test_hashes_are_of_all_tokens_before_and_of_the_salt",
        ),
    ),
    Mutant(
        "the content of a block with the right hash is compared",
        "kvrelay/engine/kvcache/block_pool.py",
        "if block is None or self._contents[block] == content:",
        "if True:",
        (
            "unit/engine/kvcache/test_kv_cache.py::test_a_block_of_the_same_hash_and_other_content_is_not_taken",
            "unit/kv_transfer/test_capabilities.py::test_kv_is_lent_of_the_tokens_and_the_salt_that_are_shown",
        ),
    ),
    Mutant(
        "a block's content tells what came before it",
        "kvrelay/engine/kvcache/block_pool.py",
        "self._serials[block] = serial or self.num_contents",
        "self._serials[block] = 1",
        (
            "unit/engine/kvcache/test_kv_cache.py::test_equal_tokens_after_a_collision_are_not_taken",
        ),
    ),
    Mutant(
        "a waiting prompt is looked up again when blocks were named",
        "prefill_worker/scheduler.py",
        "state = sequence, pool.units_available, pool.num_contents",
        "state = sequence, pool.units_available, 0",
        (
            "unit/prefill_worker/test_scheduler.py::test_a_prompt_starts_when_another_has_computed_what_it_lacks",
        ),
    ),
    Mutant(
        "a block's content tells model and salt",
        "kvrelay/engine/kvcache/kv_cache.py",
        "before: int | str = prefix.root",
        'before: int | str = ""',
        (
            "unit/engine/kvcache/test_kv_cache.py::test_a_block_of_the_same_hash_and_other_content_is_not_taken",
            "unit/kv_transfer/test_capabilities.py::test_kv_is_lent_of_the_tokens_and_the_salt_that_are_shown",
        ),
    ),
    Mutant(
        "a worker is stopped only when it is empty",
        "autoscaler/worker_drain.py",
        'info.state == "draining" and info.load.empty:',
        'info.state == "draining":',
        (
            "unit/autoscaler/test_actuator.py::test_the_emptiest_is_drained_and_stopped_only_when_it_is_empty",
        ),
    ),
    Mutant(
        "a worker is empty for good once it says that it drains",
        "autoscaler/worker_drain.py",
        'info.state == "draining" and info.load.empty:',
        "info.load.empty:",
        (
            "unit/autoscaler/test_actuator.py::test_empty_is_not_enough_before_the_worker_says_that_it_drains",
        ),
    ),
    Mutant(
        "a rank that has ended is told of",
        "kvrelay/engine/parallel/group.py",
        "if (code := process.poll()) is not None:",
        "if (code := 0):",
        ("unit/engine/parallel/test_group.py::test_long_steps_layers_and_the_death_of_a_rank",),
    ),
    Mutant(
        "a row without a distribution gives no token",
        "kvrelay/engine/sampling/categorical.py",
        "return torch.where(drawable, torch.minimum(index, last), NOT_DRAWN)[:, 0]",
        "return torch.minimum(index, last)[:, 0]",
        (
            "unit/engine/sampling/test_sequence_faults.py::test_a_token_of_the_vocabulary_or_an_error_for_its_row_alone",
            "unit/engine/sampling/test_sequence_faults.py::test_a_draw_gives_no_id_beyond_the_vocabulary_whatever_it_is_given",
        ),
    ),
    Mutant(
        "a grammar forgets the drafts of a step",
        "kvrelay/engine/sampling/matcher.py",
        "self._state.rollback(len(consumed))",
        "pass",
        (
            "unit/engine/sampling/test_compiled_grammars.py::test_the_draft_of_a_step_has_a_mask_at_each_place",
        ),
    ),
    Mutant(
        "what a grammar remembers of other answers ends one",
        "kvrelay/engine/sampling/matcher.py",
        "self._renew(token_ids, end)",
        "pass",
        (
            "unit/engine/sampling/test_compiled_grammars.py::"
            "test_what_a_grammar_remembers_of_other_answers_ends_none",
        ),
    ),
    Mutant(
        "a grammar that has remembered too much takes in no token",
        "kvrelay/engine/sampling/matcher.py",
        "self._renew(token_ids, place)",
        "pass",
        (
            "unit/engine/sampling/test_compiled_grammars.py::"
            "test_what_a_grammar_remembers_of_other_answers_ends_none",
        ),
    ),
    Mutant(
        "a tenant is charged for the masks of a step",
        "kvrelay/engine/sampling/token_masks.py",
        "granted = spent[matcher.allowance].add(seconds)",
        "granted = True",
        (
            "unit/engine/sampling/test_compiled_grammars.py::"
            "test_answers_of_one_tenant_have_no_more_time_than_one_and_others_go_on",
        ),
    ),
    Mutant(
        "the time of a tenant's grammars comes back",
        "kvrelay/engine/sampling/grammar_time.py",
        "self._left + REFILL * (now - self._at)) - seconds",
        "self._left) - seconds",
        (
            "unit/engine/sampling/test_compiled_grammars.py::"
            "test_the_time_beyond_the_usual_is_bounded_and_comes_back",
        ),
    ),
    Mutant(
        "a row with guidance is never sampled without it",
        "kvrelay/engine/sampling/sampler.py",
        "if request.params.guidance is not None and request.matcher is None:",
        "if False:",
        (
            "unit/engine/sampling/test_compiled_grammars.py::test_a_row_without_a_number_or_without_its_matcher_fails",
        ),
    ),
    Mutant(
        "a worker checks guidance although a router has done so",
        "kvrelay/sampling_limits.py",
        "check_guidance(params.guidance, params.ignore_eos, params.min_tokens)",
        "pass",
        ("unit/worker/test_guided_workers.py::test_a_worker_trusts_no_router",),
    ),
    Mutant(
        "a row without a largest logit gives no token where it is greedy",
        "kvrelay/engine/sampling/sampler.py",
        "return torch.where(logits.gather(1, index[:, None])[:, 0].isfinite(), index, NOT_DRAWN)",
        "return index",
        (
            "unit/engine/sampling/test_sequence_faults.py::test_a_token_of_the_vocabulary_or_an_error_for_its_row_alone",
        ),
    ),
    Mutant(
        "temperatures that float32 does not have are greedy",
        "kvrelay/engine/sampling/sampler.py",
        "if request.params.temperature >= LEAST_TEMPERATURE]",
        "if request.params.temperature > 0]",
        (
            "unit/engine/sampling/test_sequence_faults.py::test_temperatures_that_float32_does_not_have_are_greedy",
        ),
    ),
    Mutant(
        "a ban hides no nonsense",
        "kvrelay/engine/sampling/penalties.py",
        "torch.where(values.isfinite(), BANNED, values)",
        "torch.full_like(values, BANNED)",
        ("unit/engine/sampling/test_sequence_faults.py::test_a_ban_hides_no_nonsense",),
    ),
    Mutant(
        "a step that raises is run apart",
        "kvrelay/worker/steps/step_loop.py",
        "found = await run_apart(batch, raised, self._run)",
        "found = dict.fromkeys(batch, raised)",
        ("unit/worker/test_step_faults.py::test_less_memory_than_a_step_needs_fails_nobody",),
    ),
    Mutant(
        "an engine that fails for all is not asked for each sequence",
        "kvrelay/worker/steps/bisection.py",
        "if not worked and runs >= most_runs_in_vain(len(items)):",
        "if False:",
        (
            "unit/worker/test_bisection.py::test_an_engine_that_does_nothing_is_not_asked_for_each_sequence",
        ),
    ),
    Mutant(
        "many culprits side by side are not taken for a broken engine",
        "kvrelay/worker/steps/bisection.py",
        "pending.sort(key=len)",
        "pass",
        (
            "unit/worker/test_bisection.py::"
            "test_a_batch_whose_first_half_fails_is_not_taken_for_a_broken_engine",
        ),
    ),
    Mutant(
        "nobody finds the KV of a sequence that failed",
        WORKER,
        "self.context.cache.withdraw(sequence.blocks)",
        "pass",
        ("unit/worker/test_step_faults.py::test_nobody_finds_the_kv_of_a_sequence_that_failed",),
    ),
    Mutant(
        "sampling that is not allowed is refused by the worker",
        "kvrelay/worker/sequence_check.py",
        "        return error.message\n",
        "        pass\n",
        ("unit/worker/test_step_faults.py::test_no_value_that_a_peer_sends_reaches_the_others",),
    ),
    Mutant(
        "thinking ends where its budget is spent",
        "kvrelay/engine/sampling/thinking.py",
        "and place.tokens >= self._tokens",
        "and place.tokens > self._tokens",
        (
            "unit/engine/sampling/test_thinking.py::test_a_sampled_answer_thinks_no_longer",
            "unit/engine/sampling/test_thinking.py::test_steps_and_drafts_of_any_length_tell_the_same",
        ),
    ),
    Mutant(
        "rejected drafts are no part of the thinking",
        "kvrelay/engine/sampling/thinking.py",
        "        self._seen = end\n        place = self._place\n",
        "        self._seen = len(token_ids)\n        place = self._place\n",
        (
            "unit/engine/sampling/test_thinking.py::test_steps_and_drafts_of_any_length_tell_the_same",
        ),
    ),
    Mutant(
        "a row without a distribution fails where its thinking ends",
        "kvrelay/engine/sampling/sampler.py",
        "torch.where(tokens[row] == NOT_DRAWN, tokens[row], token_id)",
        "token_id",
        (
            "unit/engine/sampling/test_thinking.py::test_a_row_without_a_distribution_fails_all_the_same",
        ),
    ),
    Mutant(
        "the logprobs of a prompt are sent once",
        "decode_worker/decode_stage.py",
        "        sequence.scores = None\n",
        "",
        ("unit/worker/test_prompt_logprobs.py::test_both_paths_give_those_of_the_model",),
    ),
    Mutant(
        "a prompt with logprobs is computed anew",
        "kvrelay/worker/sequence.py",
        "        if self.scores is not None:\n            return\n",
        "",
        ("unit/worker/test_prompt_logprobs.py::test_both_paths_give_those_of_the_model",),
    ),
    Mutant(
        "a model is captured also after a step that raised while it was",
        "kvrelay/engine/forward/native_forward.py",
        "            logits = self._run(step)  #",
        "            self.not_captured = str(reason)\n            logits = self._run(step)  #",
        (
            "unit/engine/forward/test_native_forward.py::test_a_step_that_raises_while_it_is_captured_says_nothing_of_the_model",
        ),
    ),
    Mutant(
        "an odd command fails its own sequence",
        "kvrelay/worker/session.py",
        "                except KvRelayError as error:\n                    self._refuse(message, "
        "session, error)",
        "                except KvRelayError:\n                    return",
        (
            "unit/worker/test_odd_commands.py::test_an_odd_command_is_its_own_sequences_trouble",
            "unit/worker/test_odd_commands.py::test_odd_prefills_leave_a_prefill_worker_as_it_was",
        ),
    ),
    Mutant(
        "a router's protocol",
        "kvrelay/worker/session.py",
        'ours().check(hello.protocol, f"router {hello.router_id}")',
        "pass",
        (
            "unit/worker/test_odd_commands.py::test_a_router_of_a_protocol_that_does_not_fit_is_told_so",
        ),
    ),
    Mutant(
        "a gap in what a worker tells of its cache leads to a snapshot",
        "router/core/prefixes/cache_replica.py",
        "if update.number != self._number + 1 and not (known and update.begins):",
        "if False:",
        (
            f"{REPLICA_TESTS}::test_a_gap_asks_for_a_snapshot_and_keeps_what_is_known_until_it_comes",
        ),
    ),
    Mutant(
        "a router compares what it knows of a cache with the checksum",
        "router/core/prefixes/cache_replica.py",
        "if (len(self._blocks), self._blocks.checksum) == (update.blocks, update.checksum):",
        "if True:",
        (f"{REPLICA_TESTS}::test_another_count_or_checksum_asks_for_a_snapshot",),
    ),
    Mutant(
        "an update of a cache that comes twice or late counts once",
        "router/core/prefixes/cache_replica.py",
        "if update.number <= self._number:",
        "if False:",
        (f"{REPLICA_TESTS}::test_what_comes_twice_or_late_is_ignored",),
    ),
    Mutant(
        "a worker tells of its cache before an answer ends",
        "kvrelay/worker/worker.py",
        "self.cache_feeds.flush()",
        "pass",
        ("unit/worker/test_cache_feed.py::test_a_real_worker_tells_before_the_answer_ends",),
    ),
    Mutant(
        "blocks that vLLM has evicted make room for those in their place",
        "kvrelay/vllm_engine/cached_blocks.py",
        "if (chain := self._drop(hash)) is not None}",
        "if (chain := self._chains.get(hash)) is not None}",
        (
            "unit/vllm_engine/test_cached_blocks.py::"
            "test_they_are_those_of_the_sequences_that_vllm_has_cached",
        ),
    ),
    Mutant(
        "an older router is told nothing that it does not know",
        "kvrelay/worker/worker.py",
        "if KV_INDEX in session.protocol.features and KV_INDEX not in self.stage.lacks:",
        "if True:",
        ("unit/worker/test_cache_feed.py::test_a_real_worker_tells_before_the_answer_ends",),
    ),
    Mutant(
        "a starved engine may use other cores",
        "kvrelay/worker/runtime/cores.py",
        "self._give_up()",
        "pass",
        (
            "unit/worker/test_cores.py::"
            "test_a_thread_that_others_keep_from_running_may_use_all_cores",
        ),
    ),
    Mutant(
        "an engine that runs keeps its cores",
        "kvrelay/worker/runtime/cores.py",
        "if runs and ticks == before else 0",
        "if True else 0",
        ("unit/worker/test_cores.py::test_a_thread_that_runs_or_sleeps_keeps_its_cores",),
    ),
    Mutant(
        "a router is started again at the same ports",
        "kvrelay/launch/router_group.py",
        "listen = endpoints.fixed_in(self._config.listen)",
        "listen = self._config.listen",
        (
            "cluster/shared/test_two_routers.py::"
            "test_a_router_that_is_killed_starts_again_and_its_streams_go_on",
        ),
    ),
    Mutant(
        "a router that has answered is worth more attempts",
        "kvrelay/client/retry.py",
        "self._policy.max_reconnects if is_patient else 0",
        "0",
        ("unit/client/test_retry.py::test_a_router_that_has_answered_is_worth_more_attempts",),
    ),
)
