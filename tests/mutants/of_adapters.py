"""Safeguards of adapters: no request gets the weights, or the KV, of another."""

from __future__ import annotations

from mutants.mutant import Mutant

HASHES = "kvrelay/engine/kvcache/block_hashes.py"
RECEIVER = "kv_transfer/receiver.py"
WORKER = "kvrelay/worker/worker.py"
TABLE = "router/core/workers/worker_table.py"
VALIDATION = "router/frontend/validation.py"
CONFIG = "kvrelay/models/adapters/peft_config.py"
FILES = "kvrelay/models/adapters/adapter_files.py"
RELAY = "unit/worker/test_adapted_relay.py"
NAMES = "unit/router/test_adapter_names.py"
LOADING = "unit/worker/test_adapter_loading.py"
FOLDERS = "unit/models/adapters"
OPERATIONS = "router/frontend/adapter_operations.py"
OPERATED = "unit/router/test_adapter_operations.py"
LISTED = "unit/state/test_listed_adapters.py"
SCRIPTS = "kvrelay/state/registry_scripts.py"

MUTANTS = (
    Mutant(
        "KV blocks name their adapter",
        HASHES,
        'self.root = f"{model}+{adapter}\\0{salt}" if adapter else f"{model}\\0{salt}"',
        'self.root = f"{model}\\0{salt}"',
        (f"{RELAY}::test_the_prefix_caches_keep_the_kv_of_different_weights_apart",),
    ),
    Mutant(
        "the decode worker checks the adapter of pushed KV",
        RECEIVER,
        "if opening.adapter != lease.adapter:",
        "if False:",
        (f"{RELAY}::test_the_decode_worker_refuses_kv_of_another_adapter",),
    ),
    Mutant(
        "a worker without the adapter refuses the request",
        WORKER,
        "if spec.adapter and not runner.adapters.serves(spec.adapter):",
        "if False:",
        (f"{RELAY}::test_a_worker_without_the_adapter_refuses_the_request",),
    ),
    Mutant(
        "routing by adapter",
        TABLE,
        "if request.adapter and request.adapter not in info.adapters:",
        "if False:",
        (f"{NAMES}::test_only_workers_with_the_adapter_get_the_request",),
    ),
    Mutant(
        "resumed tokens are of the same adapter",
        VALIDATION,
        "if began is not None and request.resume and began.adapter != adapter:",
        "if False:",
        (f"{NAMES}::test_tokens_of_another_version_are_not_continued",),
    ),
    Mutant(
        "a worker registers with the listed adapters",
        "kvrelay/worker/runtime/host.py",
        "await adapters.catch_up()",
        "pass",
        (f"{LOADING}::test_a_worker_has_the_listed_adapters_when_it_registers",),
    ),
    Mutant(
        "names of modules are short",
        FILES,
        "if len(module) > MAX_NAME:",
        "if False:",
        (f"{FOLDERS}/test_adapter_files.py::test_a_long_name_of_a_module_is_refused",),
    ),
    Mutant(
        "patterns cannot take exponential time",
        CONFIG,
        'if len(pattern) > MAX_PATTERN or repeats > 2 or pattern.count("?") > 2 or nested:',
        "if len(pattern) > MAX_PATTERN:",
        (f"{FOLDERS}/test_peft_config.py::test_what_would_change_the_result_is_refused",),
    ),
    Mutant(
        "files of an adapter lie in its folder",
        FILES,
        "if not real.is_relative_to(folder.resolve()):",
        "if False:",
        (f"{FOLDERS}/test_adapter_files.py::test_hostile_folders_are_refused",),
    ),
    Mutant(
        "a name keeps its files while it is listed",
        SCRIPTS,
        "if known and not same or ARGV[5] == '1' and not same then return 0 end",
        "if ARGV[5] == '1' and not same then return 0 end",
        (f"{LISTED}::test_a_name_keeps_its_files",),
    ),
    Mutant(
        "an unloaded adapter is not served by a load that began before",
        SCRIPTS,
        "if known and not same or ARGV[5] == '1' and not same then return 0 end",
        "if known and not same then return 0 end",
        (f"{LISTED}::test_an_adapter_is_listed_before_it_is_served",),
    ),
    Mutant(
        "the name of another model is not served as an adapter",
        OPERATIONS,
        "if one.served and one.name not in reserved and self._can_serve(one)",
        "if one.served and self._can_serve(one)",
        (f"{OPERATED}::test_a_listed_name_that_is_another_models_is_not_served",),
    ),
    Mutant(
        "a router serves no adapter that none of its workers has",
        OPERATIONS,
        "return is_served and not self._refused_by_all(entry)",
        "return True",
        (f"{OPERATED}::test_an_adapter_that_the_woken_worker_refuses",),
    ),
    Mutant(
        "load returns when all processes of the router have followed",
        OPERATIONS,
        "await self._follow_everywhere(name, entry.adapter_id)",
        "pass",
        (f"{OPERATED}::test_all_processes_of_a_router_have_followed_when_a_load_returns",),
    ),
)
