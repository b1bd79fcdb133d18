"""Safeguards of what comes from outside: files, requests, Redis, model folders."""

from __future__ import annotations

from mutants.mutant import Mutant

YAML = "kvrelay/yaml_file.py"
CODEC = "kvrelay/registry_codec.py"
CHECKPOINT = "kvrelay/engine/checkpoint.py"
BODY = "router/openai_request.py"
HTTP_BODY = "router/http_body.py"
CHECKS = "router/validation.py"

_CONFIG = ("test_config_file.py::test_a_bad_file_is_refused_with_its_line",)
_JUNK = ("test_registry.py::test_junk_is_skipped_with_one_warning",)
_FOLDERS = ("engine/test_loader.py::test_spoiled_folders_are_refused",)
_HTTP = ("router/test_router_http.py::test_errors_in_openais_shape",)
_JSON = ("router/test_router_http.py::test_bodies_that_are_not_clean_json",)
_FIELDS = ("router/test_validation.py::test_bad_fields_are_named",)

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
        ("test_config_file.py::test_files_that_cannot_be_read",),
    ),
    Mutant(
        "size of a value in Redis",
        CODEC,
        "if len(raw) > MAX_VALUE_BYTES:",
        "if False:",
        ("test_registry.py::test_desired_sizes",),
    ),
    Mutant(
        "addresses of workers",
        CODEC,
        "if not any(ip in network for network in _PRIVATE if network.version == ip.version):",
        "if False:",
        _JUNK,
    ),
    Mutant("numbers in Redis", CODEC, "if number < (name in _SIZES) or (isinstance", "if (isinstance", _JUNK),
    Mutant(
        "control characters in Redis", CODEC, "if len(text) > MAX_TEXT or not text.isprintable():", "if False:", _JUNK
    ),
    Mutant(
        "an entry is of the worker that its key names",
        "kvrelay/registry.py",
        "if key_of is not None and key_of(value) != key:",
        "if False:",
        _JUNK,
    ),
    Mutant("a model folder's own code", CHECKPOINT, 'if "auto_map" in config:', "if False:", _FOLDERS),
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
        "kvrelay/engine/chat.py",
        "async with asyncio.timeout(timeout_s):",
        "async with asyncio.timeout(None):",
        ("engine/test_chat.py::test_an_endless_template_is_stopped_and_the_next_call_works",),
    ),
    Mutant("repeated keys of JSON", BODY, "if len(found) != len(pairs):", "if False:", _JSON),
    Mutant(
        "numbers that JSON does not have",
        BODY,
        "json.loads(body, parse_constant=_no_constant, ",
        "json.loads(body, ",
        _JSON,
    ),
    Mutant("depth of JSON", BODY, "except RecursionError:", "except ZeroDivisionError:", _JSON),
    Mutant("what only the router makes", BODY, "if name in _FORBIDDEN:", "if False:", _HTTP),
    Mutant("embeddings and tensors", BODY, "if name in _TENSORS:", "if False:", _HTTP),
    Mutant(
        "number of choices",
        BODY,
        'if body.get("n") == 0 or not 1 <= n * num_prompts <= MAX_CHOICES:',
        "if False:",
        _HTTP,
    ),
    Mutant(
        "size of a body",
        HTTP_BODY,
        "if len(body) > MAX_BYTES:",
        "if False:",
        ("router/test_router_http.py::test_bodies_that_cannot_be_read",),
    ),
    Mutant(
        "compressed bodies",
        HTTP_BODY,
        'if request.headers.get("content-encoding", "identity") != "identity":',
        "if False:",
        ("router/test_router_http.py::test_bodies_that_cannot_be_read",),
    ),
    Mutant(
        "size of a gRPC message",
        "router/listeners.py",
        '("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),',
        '("grpc.max_receive_message_length", -1),',
        ("router/test_router_end_to_end.py::test_message_over_the_cap",),
    ),
    Mutant(
        "numbers that are none",
        CHECKS,
        "if not math.isfinite(value) or not least <= value",
        "if math.isfinite(value) and not least <= value",
        _FIELDS,
    ),
    Mutant("request ids for logs and headers", CHECKS, "if not request_id.isprintable() or", "if", _FIELDS),
    Mutant("length of a request id", CHECKS, "if len(request_id) > MAX_REQUEST_ID:", "if False:", _FIELDS),
    Mutant("token ids", CHECKS, "if not 0 <= token_id < card.vocab_size:", "if False:", _FIELDS),
    Mutant("number of stop strings", CHECKS, "if len(options.stop) > MAX_STOPS:", "if False:", _FIELDS),
    Mutant(
        "prompt and answer fit into the context",
        CHECKS,
        "if max_tokens > room:",
        "if False:",
        ("router/test_validation.py::test_what_does_not_fit_is_named",),
    ),
)
