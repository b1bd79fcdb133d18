"""Safeguards against those who do not belong: capabilities, roles, tokens, tenants, other sites,
exposed addresses.
"""

from __future__ import annotations

from mutants.mutant import Mutant

CAPABILITY = "kvrelay/security/capability.py"
GUARD = "kvrelay/security/guard.py"
EXPORT = "kv_transfer/prefix_export.py"
ACCESS = "router/frontend/access.py"
SITES = "router/api/http/auth.py"

_ENDPOINTS = "unit/router/api/test_endpoints.py"

MUTANTS = (
    Mutant(
        "capability of a push",
        "kv_transfer/receiver.py",
        "check_capability(self._key, self._grant(lease, opening.sender), opening.capability)",
        "pass",
        ("unit/kv_transfer/test_receiver.py::test_an_open_frame_with_a_wrong_number_is_refused",),
    ),
    Mutant(
        "capability of a fetch",
        EXPORT,
        "check_capability(self.key, self._grant(request), request.capability)",
        "pass",
        ("unit/kv_transfer/test_capabilities.py::test_nobody_else_gets_it_nor_more_of_it",),
    ),
    Mutant(
        "a fetch goes as far as it was granted",
        EXPORT,
        "if tokens > request.granted_tokens:",
        "if False:",
        ("unit/kv_transfer/test_capabilities.py::test_nobody_else_gets_it_nor_more_of_it",),
    ),
    Mutant(
        "a capability is compared as a whole",
        CAPABILITY,
        "if not hmac.compare_digest(make_capability(key, grant).encode(), shown.encode()):",
        "if make_capability(key, grant)[:1] != shown[:1]:",
        (
            "unit/security/test_capability.py::test_any_single_changed_field_makes_it_invalid",
            "unit/security/test_capability.py::test_nothing_else_passes",
        ),
    ),
    Mutant(
        "a capability's fields have their lengths before them",
        CAPABILITY,
        'mac.update(len(data).to_bytes(8, "little"))\n',
        "pass\n",
        ("unit/security/test_capability.py::test_text_does_not_flow_from_field_to_field",),
    ),
    Mutant(
        "a capability is for one kind of grant",
        CAPABILITY,
        "for value in (type(grant).__name__, *astuple(grant)):",
        "for value in astuple(grant):",
        ("unit/security/test_capability.py::test_a_grant_of_one_kind_is_none_of_the_other",),
    ),
    Mutant(
        "role of a certificate",
        GUARD,
        "if roles[0] not in allowed:",
        "if False:",
        ("unit/security/test_guard.py::test_each_method_is_for_its_roles_alone",),
    ),
    Mutant(
        "a certificate has one role",
        GUARD,
        "if len(roles) != 1:",
        "if False:",
        ("unit/security/test_guard.py::test_a_certificate_without_a_role_is_nobodys",),
    ),
    Mutant(
        "peers show certificates of the cluster's CA",
        "kvrelay/security/grpc_tls.py",
        "require_client_authentication=shown.ca is not None",
        "require_client_authentication=False",
        (
            "unit/security/test_guard.py::test_who_shows_no_certificate_of_the_ca_does_not_get_beyond_the_handshake",
        ),
    ),
    Mutant(
        "token of a caller",
        ACCESS,
        "if tenant is None:",
        "if False:",
        (f"{_ENDPOINTS}::test_every_route_refuses_who_has_no_token_or_the_wrong_one",),
    ),
    Mutant(
        "role of a caller",
        ACCESS,
        "if not tenant.roles & roles:",
        "if False:",
        (
            f"{_ENDPOINTS}::test_every_route_takes_the_right_role_only",
            f"{_ENDPOINTS}::test_every_rpc_refuses_who_has_no_token_or_the_wrong_one_or_the_wrong_role",
        ),
    ),
    Mutant(
        "gRPC asks for tokens, too",
        "router/api/grpc/auth.py",
        "if details.method != OPEN_METHOD:",
        "if False:",
        (
            f"{_ENDPOINTS}::test_every_rpc_refuses_who_has_no_token_or_the_wrong_one_or_the_wrong_role",
        ),
    ),
    Mutant(
        "a broken tokens file changes nothing",
        ACCESS,
        "except ConfigError as error:\n            self.failed_loads += 1",
        "except ConfigError as error:\n            self._tenants = {}\n            "
        "self.failed_loads += 1",
        (f"{_ENDPOINTS}::test_the_file_is_read_again_and_a_broken_one_changes_nothing",),
    ),
    Mutant(
        "limits of a tenant",
        "router/frontend/rate_limits.py",
        "if wait_s > 0:",
        "if False:",
        (f"{_ENDPOINTS}::test_a_tenant_over_its_limits_is_told_when_to_come_back",),
    ),
    Mutant(
        "a cache_salt is mixed with the tenant's salt",
        "kvrelay/tenants.py",
        "digest = hashlib.blake2b(cache_salt.encode(), key=key, ",
        "digest = hashlib.blake2b(cache_salt.encode(), ",
        (
            "unit/config/test_tenants.py::test_no_cache_salt_leads_to_the_salt_of_another_tenant_or_of_another_cache_salt",
            "unit/router/test_tenants_on_workers.py::test_a_tenant_finds_its_own_prefixes_and_nobody_elses",
        ),
    ),
    Mutant(
        "users with unlike cache_salts share nothing",
        "router/core/request.py",
        "return self.tenant.salt_for(self.cache_salt)",
        "return self.tenant.salt",
        (
            "unit/router/core/test_lifecycle.py::test_each_attempt_has_the_salt_of_the_request",
            "unit/router/test_tenants_on_workers.py::test_a_tenant_finds_its_own_prefixes_and_nobody_elses",
        ),
    ),
    Mutant(
        "where a request is placed tells nothing of others' prompts",
        "router/core/dispatcher.py",
        "            block_size,\n            request.salt,\n            model=layout_hash,",
        '            block_size,\n            "",\n            model=layout_hash,',
        (
            "unit/router/core/test_dispatcher.py::test_where_and_why_a_request_is_placed_tells_nothing_of_others_prompts",
        ),
    ),
    Mutant(
        "salt of a tenant",
        "kvrelay/config/tokens_file.py",
        'return hashlib.sha256(f"kvrelay prefix '
        'cache\\0{name}\\0{first_digest}".encode()).hexdigest()',
        'return ""',
        (
            "unit/config/test_tokens_file.py::test_salts_are_the_same_whoever_reads_the_file_and_no_two_tenants_share_one",
            f"{_ENDPOINTS}::test_workers_get_the_tenants_salt",
        ),
    ),
    Mutant(
        "request ids of tenants do not meet",
        "kvrelay/tenants.py",
        'return f"{self.name}/{request_id}" if self.name else request_id',
        "return request_id",
        (f"{_ENDPOINTS}::test_clients_with_a_token_are_served_and_told_apart",),
    ),
    Mutant(
        "Host",
        SITES,
        'if name is None or not (name == self._host or is_loopback(f"{name}:0")):',
        "if False:",
        (
            "unit/router/api/http/test_connection.py::test_browsers_that_another_site_sends_are_refused",
        ),
    ),
    Mutant(
        "Origin",
        SITES,
        "if origins and origins !=",
        "if False and origins !=",
        (
            "unit/router/api/http/test_connection.py::test_browsers_that_another_site_sends_are_refused",
        ),
    ),
    Mutant(
        "what others can reach needs TLS and tokens",
        "kvrelay/config/schema.py",
        "if missing and not is_loopback(address):",
        "if False:",
        (
            "unit/config/test_config_file.py::test_other_addresses_are_for_those_who_have_tls_and_tokens",
        ),
    ),
    Mutant(
        "workers that others can reach need TLS",
        "kvrelay/config/schema.py",
        "if self.security.tls is None and not self.listen.workers_on_loopback:",
        "if False:",
        (
            "unit/config/test_config_file.py::test_other_addresses_are_for_those_who_have_tls_and_tokens",
        ),
    ),
    Mutant(
        "rows of other tenants",
        "router/observability/recent_requests.py",
        'return viewer.name == owner or "admin" in viewer.roles',
        "return True",
        (f"{_ENDPOINTS}::test_clients_with_a_token_are_served_and_told_apart",),
    ),
    Mutant(
        "tokens that an answer could have are taken when it begins",
        "router/frontend/frontend.py",
        "self.limits.take_tokens(tenant, admitted.most_tokens, self._clock.now())",
        "pass",
        (f"{_ENDPOINTS}::test_a_tenant_over_its_limits_is_told_when_to_come_back",),
    ),
    Mutant(
        "Python's lock is free while a text is encoded",
        "kvrelay/tokenizer/tokenizer.py",
        "self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids",
        "self._backend.encode(text, add_special_tokens=add_special_tokens).ids",
        (
            "unit/tokenizer/test_tokenizer.py::test_other_threads_go_on_while_a_long_text_is_encoded",
        ),
    ),
    Mutant(
        "headers of HTTP",
        "router/api/http/connections/connection.py",
        'if self._part == "head" and self._head_bytes > MAX_HEAD_BYTES:',
        "if False:",
        ("unit/router/api/http/test_connection.py::test_headers_and_bodies_over_the_bound",),
    ),
    Mutant(
        "connections of HTTP",
        "router/api/http/connections/connection.py",
        "if len(self.connections) > most_connections() and not self._make_room():",
        "if False:",
        (
            "unit/router/api/http/test_connection.py::test_connections_over_the_bound_are_ended_and_others_go_on",
        ),
    ),
    Mutant(
        "idle connections of HTTP make room",
        "router/api/http/connections/connection.py",
        "oldest.transport.abort()",
        "pass",
        (
            "unit/router/api/http/test_connection.py::test_an_idle_connection_makes_room_for_a_new_one",
        ),
    ),
    Mutant(
        "silent TLS connections make room",
        "router/api/http/connections/acceptor.py",
        "next(iter(self._handshakes)).cancel()",
        "pass",
        ("unit/router/api/http/test_acceptor.py::test_the_oldest_handshake_makes_room",),
    ),
    Mutant(
        "silent TLS connections end",
        "router/api/http/connections/acceptor.py",
        "ssl_handshake_timeout=timeout_s",
        "ssl_handshake_timeout=timeout_s and 3600.0",
        ("unit/router/api/http/test_acceptor.py::test_a_silent_handshake_ends",),
    ),
    Mutant(
        "polls are paced",
        "router/api/http/connections/pacing.py",
        "await self._waiting_room.tenant(tenant.name, poll)",
        "pass",
        (
            "unit/router/api/test_pacing.py::test_polls_wait_for_their_own_tenant_only",
            "unit/router/api/test_pacing.py::test_refused_requests_wait_answers_do_not",
        ),
    ),
    Mutant(
        "calls on gRPC are paced",
        "router/api/grpc/auth.py",
        "await self._waiting_room.tenant(tenant.name, poll=poll)",
        "pass",
        ("unit/router/api/test_pacing.py::test_grpc_is_paced_as_well",),
    ),
    Mutant(
        "refused calls on gRPC are charged",
        "router/api/grpc/service.py",
        "self._waiting_room.refused(caller.get().name)",
        "pass",
        ("unit/router/api/test_pacing.py::test_refused_calls_are_charged_on_grpc",),
    ),
    Mutant(
        "requests that wait leave one after the other",
        "router/frontend/waiting_room.py",
        "self._pace.wait_s(name, now, self._waiting[name])",
        "self._pace.wait_s(name, now)",
        ("unit/router/api/test_pacing.py::test_requests_that_wait_leave_one_after_the_other",),
    ),
    Mutant(
        "tenants wait",
        "router/frontend/waiting_room.py",
        "if not wait_s or (poll and waiting[name] >= MAX_POLLS):\n            return\n",
        "return\n",
        (
            "unit/router/api/test_pacing.py::test_polls_wait_for_their_own_tenant_only",
            "unit/router/api/test_pacing.py::test_refused_requests_wait_answers_do_not",
            "unit/router/api/test_pacing.py::test_grpc_is_paced_as_well",
        ),
    ),
    Mutant(
        "strangers wait",
        "router/frontend/waiting_room.py",
        "if not wait_s:\n            return True\n",
        "return True\n",
        (
            "unit/router/api/test_pacing.py::test_strangers_wait_for_each_other_and_hold_few_connections",
            "unit/router/api/test_pacing.py::test_strangers_on_grpc_wait_in_the_same_room",
        ),
    ),
    Mutant(
        "few strangers wait",
        "router/frontend/waiting_room.py",
        "if self._strangers >= MAX_STRANGERS:",
        "if False:",
        (
            "unit/router/api/test_pacing.py::test_strangers_wait_for_each_other_and_hold_few_connections",
            "unit/router/api/test_pacing.py::test_strangers_on_grpc_wait_in_the_same_room",
        ),
    ),
    Mutant(
        "strangers on gRPC are among those few",
        "router/api/grpc/auth.py",
        "await self._waiting_room.stranger()",
        'await self._waiting_room.tenant("", poll=True)',
        ("unit/router/api/test_pacing.py::test_strangers_on_grpc_wait_in_the_same_room",),
    ),
    Mutant(
        "strangers who leave make room",
        "router/frontend/waiting_room.py",
        "self._strangers -= 1",
        "pass",
        ("unit/router/api/test_pacing.py::test_a_stranger_who_leaves_makes_room",),
    ),
    Mutant(
        "what frames a body is bounded",
        "router/api/http/connections/connection.py",
        "if self._framing_bytes > MAX_HEAD_BYTES + self._chunks * _CHUNK_FRAMING:",
        "if False:",
        ("unit/router/api/http/test_connection_cuts.py::test_what_frames_a_body_is_bounded",),
    ),
    Mutant(
        "a client that leaves cancels the request before the one it sent last",
        "router/api/http/connections/connection.py",
        "        if self._running is not None:\n            self._disconnect(self._running)\n",
        "",
        (
            "unit/router/api/http/test_connection_cuts.py::test_a_client_that_leaves_cancels_its_request",
        ),
    ),
    Mutant(
        "a slow request does not end the answer before it",
        "router/api/http/connections/connection.py",
        "if self._answering_earlier:\n            # The connection",
        "if False:\n            # The connection",
        (
            "unit/router/api/http/test_connection_cuts.py::test_a_long_answer_outlives_the_timeout_of_the_request_behind_it",
        ),
    ),
    Mutant(
        "sessions without a hello are bounded",
        "kvrelay/worker/session.py",
        "wait = _HELLO_S if self._silent < _MAX_SILENT else 0",
        "wait = _HELLO_S",
        ("unit/worker/test_odd_commands.py::test_sessions_without_a_hello_are_capped_and_end",),
    ),
    Mutant(
        "no tenant has all connections or calls",
        "router/frontend/waiting_room.py",
        "if self._running[name] >= most:",
        "if False:",
        (
            "unit/router/api/test_pacing.py::test_no_tenant_takes_all_connections",
            "unit/router/api/test_pacing.py::test_no_tenant_has_all_calls",
        ),
    ),
    Mutant(
        "slow conversations take the lane of long ones",
        "router/frontend/tokenization.py",
        "cost = max(cost, SHORT + 1)",
        "pass",
        (
            "unit/router/frontend/test_tokenization.py::"
            "test_a_tenant_with_slow_conversations_leaves_a_renderer_to_others",
        ),
    ),
    Mutant(
        "connections leave files to the router",
        "router/api/http/connections/connection.py",
        "return min(MAX_CONNECTIONS, open_files() // 2)",
        "return MAX_CONNECTIONS",
        ("unit/router/test_process.py::test_idle_connections_leave_files_to_the_router",),
    ),
    Mutant(
        "one exposition for all",
        "router/observability/exposition.py",
        "if self._clock.now() >= self._stale_at:",
        "if True:",
        ("unit/router/api/test_pacing.py::test_one_exposition_serves_all_who_ask_at_a_time",),
    ),
    Mutant(
        "a tenant's status has its own figures only",
        "router/observability/dashboard.py",
        "figures = self._figures[viewer.sees_cluster]",
        "figures = self._figures[True]",
        (
            "unit/router/observability/test_exposure.py::test_what_a_tenant_reads_does_not_depend_on_the_others",
        ),
    ),
    Mutant(
        "a tenant's metrics are its own only",
        "router/observability/exposition.py",
        'name = "" if viewer.sees_cluster else viewer.name',
        'name = ""',
        ("unit/router/observability/test_exposure.py::test_each_tenant_is_told_of_its_own_use",),
    ),
    Mutant(
        "why has no figures of others",
        "router/core/path_policy.py",
        "return self._why(with_load=viewer.sees_cluster)",
        "return self._why(with_load=True)",
        (
            "unit/router/observability/test_exposure.py::test_why_and_ledger_have_no_figures_of_others",
        ),
    ),
    Mutant(
        "a message that cannot be read is the client's mistake",
        "router/api/grpc/messages.py",
        "if handler is None:",
        "if True:",
        ("bad_input/test_requests.py::test_over_grpc",),
    ),
    Mutant(
        "what comes at one moment is read by turns",
        "router/api/http/connections/read_turns.py",
        "if self._waiting or self._now() - self._began > SLICE_S:",
        "if False:",
        (
            "unit/router/api/http/test_read_turns.py::test_rounds_of_the_loop_are_short_and_what_one_sends_stays_in_order",
        ),
    ),
    Mutant(
        "what waited is read by turns too",
        "router/api/http/connections/read_turns.py",
        "if self._now() - self._began > SLICE_S:\n                break",
        "pass",
        (
            "unit/router/api/http/test_read_turns.py::test_rounds_of_the_loop_are_short_and_what_one_sends_stays_in_order",
        ),
    ),
    Mutant(
        "each tenant has its turn to be read",
        "router/api/http/connections/read_turns.py",
        "self._waiting.setdefault(who, deque())",
        "self._waiting.setdefault(None, deque())",
        (
            "unit/router/api/http/test_read_turns.py::test_nobody_waits_for_more_than_one_read_of_each_other",
        ),
    ),
    Mutant(
        "a connection's turn is its tenant's",
        "router/api/http/connections/connection.py",
        "tenant.name if tenant else",
        "None if tenant else",
        (
            "unit/router/api/http/test_connection.py::test_a_connection_is_read_in_the_turns_of_its_tenant",
        ),
    ),
    Mutant(
        "connections that come at one moment let others run",
        "router/api/http/connections/acceptor.py",
        "await asyncio.sleep(0)  # an accept",
        "pass  # an accept",
        (
            "unit/router/api/http/test_connection.py::test_connections_that_come_at_one_moment_let_others_run",
        ),
    ),
)
