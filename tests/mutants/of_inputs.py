"""Safeguards of what comes from outside: files, requests, Redis, model folders."""

from __future__ import annotations

from mutants.mutant import Mutant

YAML = "kvrelay/config/yaml_file.py"
CODEC = "kvrelay/state/registry_codec.py"
CHECKPOINT = "kvrelay/engine/model/checkpoint.py"
BODY = "router/api/http/field_checks.py"
PARSER = "router/api/http/json_parser.py"
HTTP_BODY = "router/api/http/body.py"
MESSAGES = "router/api/http/dialects/anthropic/requests.py"
CHECKS = "router/frontend/validation.py"
LIMITS = "kvrelay/sampling_limits.py"

_CONFIG = ("unit/config/test_config_file.py::test_a_bad_file_is_refused_with_its_line",)
_JUNK = ("unit/state/test_registry.py::test_junk_is_skipped_with_one_warning",)
_FOLDERS = ("unit/engine/model/test_loader.py::test_spoiled_folders_are_refused",)
_ROUTES = "unit/router/api/http"
_EVENTS = "unit/router/runtime/test_odd_events.py"
_NUMBERS = "unit/engine/sampling/test_schema_numbers.py"
_HTTP = ("unit/router/api/http/test_openai.py::test_errors_in_openais_shape",)
_JSON = ("unit/router/api/http/test_openai.py::test_bodies_that_are_not_clean_json",)
_BOUNDS = ("unit/router/api/http/test_json_parser.py::test_depth_and_numbers_are_bounded",)
_FIELDS = ("unit/router/frontend/test_validation.py::test_bad_fields_are_named",)

MUTANTS = (
    Mutant("YAML without tags", YAML, "if event.tag is not None:", "if False:", _CONFIG),
    Mutant(
        "YAML without aliases",
        YAML,
        "if isinstance(event, yaml.AliasEvent) or event.anchor is not None:",
        "if False:",
        _CONFIG,
    ),
    Mutant("depth of YAML", YAML, "if self._depth == _MAX_DEPTH:", "if False:", _CONFIG),
    Mutant("repeated keys of YAML", YAML, "if key.value in mapping:", "if False:", _CONFIG),
    Mutant(
        "size of YAML",
        YAML,
        "if len(raw) > MAX_BYTES:",
        "if False:",
        ("unit/config/test_config_file.py::test_files_that_cannot_be_read",),
    ),
    Mutant(
        "size of a value in Redis",
        CODEC,
        "if len(raw) > MAX_VALUE_BYTES:",
        "if False:",
        ("unit/state/test_registry.py::test_desired_sizes",),
    ),
    Mutant(
        "addresses of workers",
        CODEC,
        "if not any(ip in network for network in _PRIVATE if network.version == ip.version):",
        "if False:",
        _JUNK,
    ),
    Mutant(
        "numbers in Redis",
        CODEC,
        "if number < (name in _SIZES) or (isinstance",
        "if (isinstance",
        _JUNK,
    ),
    Mutant(
        "control characters in Redis",
        CODEC,
        "if len(text) > MAX_TEXT or not text.isprintable():",
        "if False:",
        _JUNK,
    ),
    Mutant(
        "an entry is of the worker that its key names",
        "kvrelay/state/registry_values.py",
        "if key_of is not None and key_of(value) != key:",
        "if False:",
        _JUNK,
    ),
    Mutant(
        "a model folder's own code", CHECKPOINT, 'if "auto_map" in config:', "if False:", _FOLDERS
    ),
    Mutant(
        "links out of a model folder",
        CHECKPOINT,
        "if not file.resolve().is_relative_to(root.resolve()):",
        "if False:",
        _FOLDERS,
    ),
    Mutant(
        "names of shards",
        CHECKPOINT,
        'if Path(name).name != name or Path(name).suffix != ".safetensors":',
        "if False:",
        _FOLDERS,
    ),
    Mutant(
        "a conversation's template has a time limit",
        "kvrelay/tokenizer/chat_renderer.py",
        'signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])',
        "pass",
        (
            "unit/tokenizer/test_chat_template.py::test_an_endless_template_is_stopped_and_the_next_call_works",
        ),
    ),
    Mutant(
        "an answer to another conversation is not taken",
        "kvrelay/tokenizer/chat_template.py",
        'if reply.get("call") != request["call"]:',
        "if False:",
        ("unit/tokenizer/test_chat_template.py::test_an_answer_to_another_call_is_not_taken",),
    ),
    Mutant(
        "a template's process that ends is asked again",
        "kvrelay/tokenizer/chat_template.py",
        "for _ in range(2):",
        "for _ in range(1):",
        ("unit/tokenizer/test_chat_template.py::test_a_process_that_is_killed_in_a_call",),
    ),
    Mutant("repeated keys of JSON", PARSER, "if name in of:", "if False:", _JSON),
    Mutant("depth of JSON", PARSER, "if len(stack) >= MAX_DEPTH:", "if False:", _BOUNDS),
    Mutant(
        "values of JSON",
        PARSER,
        "if self._integers > MAX_INTEGERS or self._values > MAX_VALUES:",
        "if False:",
        ("unit/router/api/http/test_json_parser.py::test_numbers_of_values_are_bounded",),
    ),
    Mutant(
        "a body is parsed in slices",
        "router/runtime/loop_slices.py",
        "while cost < most:",
        "while True:",
        (
            "unit/router/runtime/test_fair_threads.py::test_between_two_slices_the_loop_serves_others_and_tenants_take_turns",
        ),
    ),
    Mutant(
        "entries of a field of gRPC",
        "kvrelay/wire/encoding/field_bounds.py",
        "if counts[name] > bound:",
        "if False:",
        (
            "unit/wire/test_field_bounds.py::test_a_field_at_its_bound_passes_and_one_over_it_is_named",
        ),
    ),
    Mutant(
        "a gRPC message is looked at before it is parsed",
        "router/api/grpc/messages.py",
        "await self._slices.run(tenant, check_fields(data, kind, self._bounds))",
        "pass",
        ("unit/router/api/test_hostile_requests.py::test_messages_over_grpc",),
    ),
    Mutant(
        "a call whose message does not come gives way",
        "router/api/grpc/receive_slots.py",
        "or self._evict(found[1].tenant, loop.time()):",
        ":",
        (
            "unit/router/api/grpc/test_bounds.py::test_a_slow_message_gives_way_to_a_tenant_without_slots",
        ),
    ),
    Mutant(
        "a tenant leaves slots to others",
        "router/api/grpc/receive_slots.py",
        "if held[name] >= free}",
        "if False}",
        ("unit/router/api/grpc/test_bounds.py::test_a_tenant_leaves_slots_to_others",),
    ),
    Mutant(
        "a silent probe gives way",
        "router/api/grpc/receive_slots.py",
        "if len(self._taken) >= self._slots:",
        "if False:",
        ("unit/router/api/grpc/test_bounds.py::test_a_new_probe_takes_the_slot_of_the_oldest",),
    ),
    Mutant(
        "messages of reflection",
        "router/api/grpc/messages.py",
        'if not method.startswith("/kvrelay.") and len(data) > MAX_PROBE_BYTES:',
        "if False:",
        (
            "unit/router/api/grpc/test_bounds.py::test_messages_of_reflection_are_bounded_in_size_and_number",
        ),
    ),
    Mutant(
        "an answer that nobody reads ends",
        "router/api/grpc/service.py",
        "if left:",
        "if False:",
        ("unit/router/test_end_to_end.py::test_a_client_that_does_not_read_is_left",),
    ),
    Mutant(
        "bodies of one tenant make room for those of others",
        "router/core/body_budget.py",
        "if most == holding.tenant:",
        "if True:",
        (
            "unit/router/core/queueing/test_fair_order.py::test_slow_uploads_of_one_tenant_do_not_keep_others_out",
            "unit/router/api/test_hostile_requests.py::test_slow_uploads_of_one_tenant_leave_the_others_alone",
        ),
    ),
    Mutant(
        "a lane for short texts",
        "router/core/queueing/short_job_lanes.py",
        "self._order.first((0, 1) if self._free_for_long else (0,))",
        "self._order.first((0, 1))",
        (
            "unit/router/core/queueing/test_fair_order.py::test_long_jobs_leave_a_lane_to_short_ones",
            "unit/router/runtime/test_fair_threads.py::test_a_short_text_does_not_wait_for_long_ones_of_another_tenant",
        ),
    ),
    Mutant(
        "work is charged to its tenant",
        "router/core/queueing/fair_order.py",
        "line.counter += cost / line.weight",
        "pass",
        (
            "unit/router/core/queueing/test_fair_order.py::test_a_tenant_waits_for_one_job_of_another_not_for_its_line",
        ),
    ),
    Mutant(
        "a text that cannot fit is not tokenized",
        "router/frontend/tokenization.py",
        'bound.check(field, tokenizer.fewest_tokens(text), "at least ")',
        "pass",
        (
            "unit/router/runtime/test_fair_threads.py::test_a_text_that_cannot_fit_is_refused_without_a_thread",
        ),
    ),
    Mutant(
        "chunks of a byte",
        "router/api/http/connections/connection.py",
        "if self._chunks > FREE_CHUNKS + self._body_bytes // CHUNK_BYTES:",
        "if False:",
        (
            "unit/router/api/http/test_connection.py::test_a_body_in_tiny_chunks_is_refused_and_one_in_many_large_ones_is_not",
        ),
    ),
    Mutant(
        "the host of a whole URL counts",
        "router/api/http/connections/connection.py",
        'self.headers[:] = [(b"host", host), *(one for one in self.headers if one[0] != b"host")]',
        "pass",
        (
            "unit/router/api/http/test_connection.py::test_a_target_may_be_a_whole_url_whose_host_counts",
        ),
    ),
    Mutant(
        "lines of a head",
        "router/api/http/connections/connection.py",
        "if len(self.headers) > MAX_HEAD_LINES:",
        "if False:",
        (
            "unit/router/api/http/test_connection.py::test_a_head_of_many_lines_is_refused_also_behind_another_request",
        ),
    ),
    Mutant(
        "trailers are no headers",
        "router/api/http/connections/connection.py",
        """if self._part == "body":
            return
        super().on_header""",
        "super().on_header",
        ("unit/router/api/http/test_connection_cuts.py::test_trailers_are_not_taken_for_headers",),
    ),
    Mutant(
        "requests that arrive at once are parsed one after the other",
        "router/api/http/connections/connection.py",
        "self._refusal is None and (self._part is not None or not self._answering)",
        "True",
        (
            "unit/router/api/http/test_connection_cuts.py::test_requests_behind_another_wait_unparsed",
        ),
    ),
    Mutant(
        "a router that ended waits for no thread",
        "kvrelay/cli/router.py",
        "        end_now()",
        "        pass",
        ("unit/router/test_process.py::test_threads_that_never_end_do_not_keep_the_process",),
    ),
    Mutant(
        "serve waits for no thread when it has ended",
        "kvrelay/cli/serve.py",
        "end_now(code)",
        "raise SystemExit(code)",
        (
            "unit/cli/test_cli_interrupted.py::"
            "test_a_thread_that_a_file_system_blocks_does_not_keep_the_process",
        ),
    ),
    Mutant(
        "a router whose end hangs is ended",
        "router/main.py",
        "    end_after(DRAIN_GRACE_S + END_S)",
        "    pass",
        ("unit/router/test_process.py::test_a_router_whose_end_hangs_is_ended",),
    ),
    Mutant(
        "tokens are read again while threads are busy",
        "router/frontend/access.py",
        "await loop.run_in_executor(self._thread, _signature, self._path)",
        "await loop.run_in_executor(None, _signature, self._path)",
        (
            "unit/router/api/test_hostile_requests.py::test_a_token_that_is_withdrawn_works_no_more_while_threads_are_busy",
        ),
    ),
    Mutant("what only the router makes", BODY, "if name in _FORBIDDEN:", "if False:", _HTTP),
    Mutant("embeddings and tensors", BODY, "if name in _TENSORS:", "if False:", _HTTP),
    Mutant(
        "number of choices",
        "router/api/http/dialects/openai/requests.py",
        "if n * num_prompts > MAX_CHOICES:",
        "if False:",
        ("unit/router/api/http/test_request_models.py::test_the_bound_is_on_prompts_times_n",),
    ),
    Mutant(
        "size of a body",
        HTTP_BODY,
        "if size > MAX_BYTES:",
        "if False:",
        ("unit/router/api/http/test_openai.py::test_bodies_that_cannot_be_read",),
    ),
    Mutant(
        "compressed bodies",
        HTTP_BODY,
        'if request.headers.get("content-encoding", "identity") != "identity":',
        "if False:",
        ("unit/router/api/http/test_openai.py::test_bodies_that_cannot_be_read",),
    ),
    Mutant(
        "size of a gRPC message",
        "router/api/grpc/listener.py",
        '("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),',
        '("grpc.max_receive_message_length", -1),',
        ("unit/router/test_end_to_end.py::test_message_over_the_cap",),
    ),
    Mutant(
        "numbers that are none",
        LIMITS,
        "not limit.least <= value <= limit.most:",
        "(value < limit.least or value > limit.most):",
        _FIELDS,
    ),
    Mutant(
        "request ids for logs and headers",
        CHECKS,
        "if not request_id.isprintable() or",
        "if",
        _FIELDS,
    ),
    Mutant(
        "length of a request id",
        CHECKS,
        "if len(request_id) > MAX_REQUEST_ID:",
        "if False:",
        _FIELDS,
    ),
    Mutant("token ids", CHECKS, "if not 0 <= token_id < card.vocab_size:", "if False:", _FIELDS),
    Mutant(
        "number of stop strings", CHECKS, "if len(options.stop) > MAX_STOPS:", "if False:", _FIELDS
    ),
    Mutant(
        "prompt and answer fit into the context",
        CHECKS,
        "if max_tokens > room:",
        "if False:",
        ("unit/router/frontend/test_validation.py::test_what_does_not_fit_is_named",),
    ),
    Mutant(
        "a chat without max_tokens leaves its tenant room for others",
        CHECKS,
        "max(DEFAULT_MAX_TOKENS, limit // 10)",
        "max(DEFAULT_MAX_TOKENS, limit)",
        (
            "unit/router/frontend/test_validation.py::test_an_answer_to_messages_may_fill_the_context_and_a_tenth_of_the_tenants_limit",
        ),
    ),
    Mutant(
        "clients do not set what the router gives to the chat template",
        "router/api/http/chat/template_variables.py",
        "chosen.keys() & _TEMPLATE_ARGUMENTS",
        "chosen.keys() & set()",
        ("unit/router/api/http/test_tools.py::test_refused",),
    ),
    Mutant(
        "the schema of a tool keeps its own references",
        "router/api/http/adapted_schema.py",
        "value = to + value[1:]",
        "pass",
        (f"{_ROUTES}/test_structured_output.py::test_references_of_a_tools_schema_hold",),
    ),
    Mutant(
        "the anchors of several tools do not meet",
        "router/api/http/adapted_schema.py",
        "found[name] = anchors + value",
        "found[name] = value",
        (f"{_ROUTES}/test_adapted_schema.py::test_anchors_of_several_tools_do_not_meet",),
    ),
    Mutant(
        "a part with an id refers to its own parts",
        "router/api/http/adapted_schema.py",
        'to, anchors = "#", ""',
        "pass",
        (f"{_ROUTES}/test_adapted_schema.py::test_a_part_with_an_id_refers_to_its_own_parts",),
    ),
    Mutant(
        "a schema of the client cannot set the options of the grammar library",
        "router/api/http/structured_output.py",
        'schema |= {"x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": False}}',
        "pass",
        (f"{_ROUTES}/test_guidance_with_calls.py::test_a_schema_cannot_change_the_options",),
    ),
    Mutant(
        "whitespace between calls and in them is bounded",
        "router/api/http/structured_output.py",
        'schema |= {"x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": False}}',
        "pass",
        (f"{_ROUTES}/test_guidance_with_calls.py::test_whitespace_is_bounded",),
    ),
    Mutant(
        "a group does not end the counting of fields",
        "kvrelay/wire/encoding/field_bounds.py",
        'raise InvalidArgument("the message contains a group, which is not supported")',
        'raise Malformed("a group")',
        (
            "unit/wire/test_field_bounds.py::test_nothing_stops_the_counting_before_the_parser_stops",
        ),
    ),
    Mutant(
        "an event that cannot be read ends its session alone",
        "router/runtime/sessions.py",
        "answered(message, self.info.worker_id)",
        "message",
        (f"{_EVENTS}::test_an_event_that_cannot_be_read_ends_its_session_alone",),
    ),
    Mutant(
        "numbers of a schema are read exactly when llguidance reads them for the first time",
        "kvrelay/engine/sampling/grammar.py",
        "with_exact_numbers(guidance.source)",
        "guidance.source",
        (f"{_NUMBERS}::test_an_answer_has_the_number_of_the_schema",),
    ),
    Mutant(
        "numbers of a schema are read exactly when llguidance reads them again",
        "kvrelay/engine/sampling/grammar.py",
        "with_exact_numbers(grammar)",
        "grammar",
        (f"{_NUMBERS}::test_an_answer_has_the_number_of_the_schema",),
    ),
    Mutant(
        "numbers of a schema beside calls are read exactly",
        "router/api/http/structured_output.py",
        "with_exact_numbers(json.dumps(schema, ensure_ascii=False))",
        "json.dumps(schema, ensure_ascii=False)",
        (f"{_ROUTES}/test_guidance_with_calls.py::test_a_number_of_the_schema_is_the_answers",),
    ),
    Mutant(
        "long schemas are joined beside the event loop",
        "router/api/http/chat/answer_format.py",
        """await self._guidance.run(
                tenant, cost, lambda: self._with_calls(guidance, use, field)
            )""",
        "self._with_calls(guidance, use, field)",
        (f"{_ROUTES}/test_structured_output.py::test_schemas_are_joined_beside_the_event_loop",),
    ),
    Mutant(
        "no part of a schema has the name of the whole",
        "kvrelay/engine/sampling/grammar.py",
        "check_ids(schema)",
        "pass",
        ("unit/engine/sampling/test_schema_ids.py::test_no_part_takes_the_place_of_the_whole",),
    ),
    Mutant(
        "a long schema is not written to be refused",
        "router/api/http/structured_output.py",
        "if is_longer(schema, MAX_GUIDANCE):",
        "if False:",
        (f"{_ROUTES}/test_json_writing.py::test_long_values_are_refused_unwritten",),
    ),
    Mutant(
        "long inputs of calls are not written to be refused",
        MESSAGES,
        "if has_more_values(inputs, _MAX_INPUT_VALUES):",
        "if False:",
        (f"{_ROUTES}/test_json_writing.py::test_long_values_are_refused_unwritten",),
    ),
    Mutant(
        "an object that several schemas describe is not closed",
        "router/api/http/closed_schema.py",
        "return dict(schema) if any(map(_refers, combined)) else found",
        "return found",
        (f"{_ROUTES}/test_closed_schema.py::test_unchanged",),
    ),
    Mutant(
        "an object that requires an undeclared property is not closed",
        "router/api/http/closed_schema.py",
        "isinstance(one, str) and one in declared for one in required",
        "True for one in required",
        (f"{_ROUTES}/test_closed_schema.py::test_unchanged",),
    ),
    Mutant(
        "each role has its own blocks",
        MESSAGES,
        "if not _add_block(conversation, role, block):",
        "if not (_add_block(conversation, role, block) or True):",
        (f"{_ROUTES}/test_messages.py::test_bodies_that_are_refused",),
    ),
    Mutant(
        "a line that differs in every request is no part of the prompt",
        MESSAGES,
        'if not one["text"].startswith(_BILLING)',
        "if True",
        (f"{_ROUTES}/test_messages.py::test_turns_become_messages",),
    ),
    Mutant(
        "more tokens than the context holds are cut for clients that cannot know it",
        "router/api/http/choices.py",
        "if completion.cut_to_context:",
        "if False:",
        (f"{_ROUTES}/test_responses_client.py::test_a_limit_above_the_context_is_cut_to_it",),
    ),
    Mutant(
        "an answer that a grammar binds does not go on thinking",
        "router/api/http/chat/answer_format.py",
        "begun = not self._bound and self._text.thinks(",
        "begun = self._text.thinks(",
        (f"{_ROUTES}/test_responses_client.py::test_a_bound_answer_is_no_thinking",),
    ),
    Mutant(
        "the logprobs of a token that tells nothing yet are not lost",
        "router/api/http/dialects/responses/shape.py",
        "            self._untold.take(logprobs)",
        "            self._scores.add(logprobs)",
        (f"{_ROUTES}/test_responses_client.py::test_logprobs",),
    ),
    Mutant(
        "tokens of a marker count with what it begins",
        "router/api/http/chat/answer.py",
        "        if not said:\n            return\n        thought",
        "        thought",
        (
            f"{_ROUTES}/test_dialects.py::test_tokens_of_reasoning_are_those_of_the_responses_that_tell_it",
        ),
    ),
    Mutant(
        "the bound of a head does not depend on its cuts",
        "router/api/http/connections/connection.py",
        "if len(self.url) + lines > MAX_HEAD_BYTES:",
        "if False:",
        (
            f"{_ROUTES}/test_connection_cuts.py::"
            "test_the_bound_of_a_head_does_not_depend_on_its_cuts",
        ),
    ),
    Mutant(
        "a client that leaves while it is admitted gets its tokens back once",
        "router/frontend/frontend.py",
        "            if not streams:\n                self.limits",
        "            if True:\n                self.limits",
        (
            "unit/router/frontend/test_frontend.py::"
            "test_a_client_that_leaves_while_it_is_admitted_gets_its_tokens_back_once",
        ),
    ),
    Mutant(
        "a panic of a grammar fails its sequence",
        "kvrelay/worker/guided_starts.py",
        "except BaseException as error:",
        "except Exception as error:",
        (
            "unit/worker/test_guided_workers.py::"
            "test_a_grammar_that_fails_in_an_unknown_way_fails_its_sequence_alone",
        ),
    ),
    Mutant(
        "a name that Redis has lost is not given again",
        "kvrelay/state/registry_scripts.py",
        "if ARGV[5] ~= '' and",
        "if false and",
        ("unit/state/test_registry.py::test_names_that_redis_has_lost_are_not_given_again",),
    ),
)
