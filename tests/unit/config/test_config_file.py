from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cli.options.cluster import OWN_CLUSTER
from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.config.config_file import load_config, load_policy
from kvrelay.config.model_sections import ModelSections
from kvrelay.config.schema import ClusterConfig
from kvrelay.config.security import KeyPairConfig, SecurityConfig
from kvrelay.config.tokens_file import load_tokens
from kvrelay.errors import ConfigError
from kvrelay.planning.profile import Profile
from kvrelay.planning.step_cost_model import StepCostModel

CONFIGS = Path(__file__).parents[3] / "configs"
POLICY = "prefill:\n  metrics:\n    - {name: queue_depth, target: %s}\n"

# name: (text, line, what the message says after FILE:LINE)
BAD_CONFIGS = {
    "unknown key": (
        "kv:\n  blocksize: 8\n",
        2,
        "kv.blocksize: unknown key; did you mean block_size? allowed are dtype, block_s",
    ),
    "unknown key of an optional section": (
        "decode:\n  speculation:\n    kind: ngram\n    token: 4\n",
        4,
        "decode.speculation.token: unknown key; did you mean tokens? allowed are kind, tokens, "
        "max_batch, min_ngram,",
    ),
    "unknown kind of speculation": (
        "decode: {speculation: {kind: eagle}}\n",
        1,
        "decode.speculation.kind: must be 'ngram', 'suffix' or 'draft', not",
    ),
    "draft without a model": (
        "decode:\n  speculation: {kind: draft}\n",
        2,
        "decode.speculation: kind draft needs a model; set model to the draft model's folder",
    ),
    "model without a draft": (
        "decode:\n  speculation:\n    model: demo\n",
        3,
        "decode.speculation.model: has no meaning for kind ngram; set kind: draft, or leave it",
    ),
    "draft model of ranks": (
        "decode:\n  tensor_parallel: 2\n  speculation: {kind: draft, model: demo}\n",
        3,
        "decode.speculation.kind: draft cannot be combined with decode.tensor_parallel 2, whose",
    ),
    "n-grams from long to short": (
        "decode:\n  speculation: {min_ngram: 5}\n",
        2,
        "decode.speculation: min_ngram 5 is above max_ngram 4",
    ),
    "unknown section": ("\n\nprefil: {}\n", 3, "prefil: unknown key; did you mean prefill?"),
    "key of control characters": ('"\\e[2J": 1\n', 1, "'\\x1b[2J': unknown key"),
    "repeated key": (
        "decode:\n  threads: 1\n  threads: 2\n",
        3,
        "decode.threads: repeated key; first on line 2",
    ),
    "repeated section": ("kv: {}\nkv: {}\n", 2, "kv: repeated key; first on line 1"),
    "key that is no word": ("? [a, b]\n: 1\n", 1, "a key must be a plain string"),
    "python tag": (
        "a: 1\nb: !!python/object/apply:os.system [id]\n",
        2,
        "tag 'tag:yaml.org,2002:python/object",
    ),
    "harmless tag": (
        "kv: {block_size: !!int '8'}\n",
        1,
        "tag 'tag:yaml.org,2002:int': tags are not allowed",
    ),
    "anchor": ("kv: &a {block_size: 8}\n", 1, "anchors and aliases are not allowed"),
    "alias bomb": (
        "a: &a [x, "
        "x]\n"
        + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        1,
        "anchors and aliases are not allowed",
    ),
    "merge key": ("kv:\n  <<: {block_size: 8}\n", 2, "kv.<<: unknown key"),
    "sequence at the top": ("- kv\n", 1, "must be a mapping"),
    "word at the top": ("\nkv\n", 2, "must be a mapping"),
    "word for a section": (
        "kv: fast\n",
        1,
        "kv: must be a mapping with the keys dtype, block_size, memory, digest",
    ),
    "list for a section": ("kv:\n  - 1\n", 1, "kv: must be a mapping with the keys"),
    "mapping for a word": (
        "model:\n  path: {a: 1}\n",
        2,
        "model.path: must be a string, not a mapping",
    ),
    "number for a string": ("model: {path: 7}\n", 1, "model.path: must be a string, not 7"),
    "string for a number": (
        "prefill:\n  threads: many\n",
        2,
        'prefill.threads: must be a whole number, not "many"',
    ),
    "quoted number": (
        "prefill:\n  threads: '2'\n",
        2,
        'prefill.threads: must be a whole number, not "2"',
    ),
    "quoted float": (
        "transfer: {lease_s: '2'}\n",
        1,
        'transfer.lease_s: must be a number, not "2"',
    ),
    "fraction": (
        "prefill:\n  threads: 1.5\n",
        2,
        "prefill.threads: must be a whole number, not 1.5",
    ),
    "octal": ("kv:\n  block_size: 010\n", 2, 'kv.block_size: must be a whole number, not "010"'),
    "sexagesimal": (
        "kv:\n  block_size: 1:30\n",
        2,
        'kv.block_size: must be a whole number, not "1:30"',
    ),
    "zero": ("router: {max_queue: 0}\n", 1, "router.max_queue: must be above 0, not 0"),
    "unknown weights": (
        "prefill:\n  weights: int4\n",
        2,
        "prefill.weights: must be 'auto' or 'int8', not \"int4\"",
    ),
    "processes": ("router: {processes: 0}\n", 1, "router.processes: must be at least 1, not 0"),
    "negative": ("router: {max_queue: -3}\n", 1, "router.max_queue: must be above 0, not -3"),
    "too large": ("kv: {block_size: 2048}\n", 1, "kv.block_size: must be at most 1024, not 2048"),
    "very large": (
        "kv: {block_size: %s}\n" % ("9" * 5000),
        1,
        "kv.block_size: must be a whole number",
    ),
    "not a number": (
        "transfer: {lease_s: .nan}\n",
        1,
        "transfer.lease_s: must be a finite number, not NaN",
    ),
    "infinite": (
        "transfer: {lease_s: .inf}\n",
        1,
        "transfer.lease_s: must be a finite number, not Infinity",
    ),
    "overflow": (
        "transfer: {lease_s: 1e999}\n",
        1,
        "transfer.lease_s: must be a finite number, not Infinity",
    ),
    "bare off for a word": (
        "transfer:\n  transport: off\n",
        2,
        "transfer.transport: must be 'auto', 'memory'",
    ),
    "bare on for a number": (
        "decode:\n  threads: on\n",
        2,
        "decode.threads: must be a whole number, not true; YAML reads a bare on, off, yes or no as "
        "a boolean",
    ),
    "bare yes for a float": (
        "transfer: {lease_s: yes}\n",
        1,
        "transfer.lease_s: must be a number, not true; YAML",
    ),
    "bare no for a string": (
        "model: {path: no}\n",
        1,
        "model.path: must be a string, not false; YAML reads",
    ),
    "word for a boolean": (
        "kv: {digest: maybe}\n",
        1,
        'kv.digest: must be true or false, not "maybe"',
    ),
    "number for a boolean": ("kv: {digest: 1}\n", 1, "kv.digest: must be true or false, not 1"),
    "int8 weights with ranks": (
        "prefill: {tensor_parallel: 2, weights: int8}\n",
        1,
        "prefill.weights: int8 cannot be combined with prefill.tensor_parallel 2, which does not "
        "run the native kernels; set weights: auto or tensor_parallel: 1",
    ),
    "a GPU for two ranks": (
        "decode:\n  tensor_parallel: 2\n  resources: {num_gpus: 1}\n",
        3,
        "decode.resources.num_gpus: 1 GPUs are too few for decode.tensor_parallel 2, or not a "
        "whole number; set num_gpus to 2 or more, or to 0 for the CPU",
    ),
    "quantised KV on a GPU": (
        "decode:\n  kv: {dtype: int8}\n  resources: {num_gpus: 1}\n",
        2,
        "decode.kv.dtype: int8 KV cannot be read on a GPU by kvrelay's own engine; set kv.dtype: "
        "auto, or engine: vllm with engine_args: {kv_cache_dtype: fp8}",
    ),
    "unknown KV dtype": (
        "kv:\n  dtype: fp8\n",
        2,
        "kv.dtype: must be 'auto', 'int8' or 'int4', not \"fp8\"",
    ),
    "unknown choice": (
        "router: {policy: best}\n",
        1,
        "router.policy: must be 'kv_aware', 'least_loaded' or",
    ),
    "bad size": (
        "kv: {memory: 1 GiBB}\n",
        1,
        "kv.memory: '1 GiBB' is not a size; write a number with one of B, KiB, MiB, GiB, TiB, "
        "kB, KB, MB, GB, TB",
    ),
    "endless size": ("kv: {memory: %sGiB}\n" % ("9" * 400), 1, "kv.memory: '9999"),
    "boolean size": ("kv: {memory: on}\n", 1, "kv.memory: True is not a size"),
    "zero size": ("kv: {memory: 0GiB}\n", 1, "kv.memory: must be above 0"),
    "public address": (
        "listen:\n  grpc: 0.0.0.0:50051\n",
        2,
        "listen.grpc: 0.0.0.0:50051 is not a loopback address and needs security.tls and "
        "security.tokens_file",
    ),
    "public address without TLS": (
        "security: {tokens_file: t}\nlisten:\n  grpc: localhost:1\n  http: '[::]:80'\n",
        4,
        "listen.http: [::]:80 is not a loopback address and needs security.tls; set it, or ",
    ),
    "public address without tokens": (
        "security: {tls: {ca: a, router: {cert: a, key: a}, worker: {cert: a, key: a}}}\nlisten: "
        "{admin: 10.0.0.1:1}\n",
        2,
        "listen.admin: 10.0.0.1:1 is not a loopback address and needs security.tokens_file; set "
        "it, or listen on",
    ),
    "Ray's own resource": (
        "decode: {resources: {custom: {GPU: 1}}}\n",
        1,
        "decode.resources.custom: 'GPU' is not the name",
    ),
    "no resource": (
        "decode: {resources: {custom: {a: 0}}}\n",
        1,
        "decode.resources.custom.a: must be at least 0.0001, not 0",
    ),
    "less than Ray can reserve": (
        "decode: {resources: {num_cpus: 0.00005}}\n",
        1,
        "decode.resources.num_cpus: 5e-05 is less than 0.0001, the least amount that Ray can "
        "reserve; set 0.0001 or more, or 0 to reserve nothing",
    ),
    "one and a half GPUs": (
        "prefill: {resources: {num_gpus: 1.5}}\n",
        1,
        "prefill.resources.num_gpus: 1.5 is above 1 and not a whole number, which Ray does not "
        "accept; set a whole number, or a share",
    ),
    "resource with an umlaut": (
        "decode: {resources: {custom: {gerät: 1}}}\n",
        1,
        "decode.resources.custom: 'gerät' is not ASCII, which Ray requires",
    ),
    "word for resources": (
        "decode: {resources: {custom: a}}\n",
        1,
        'decode.resources.custom: must be a mapping, not "a"',
    ),
    "no port": ("listen: {http: localhost}\n", 1, "listen.http: 'localhost' is not HOST:PORT"),
    "port too large": (
        "listen: {http: 'localhost:65536'}\n",
        1,
        "listen.http: 'localhost:65536' is not HOST:PORT",
    ),
    "workers that others can reach": (
        "listen:\n  worker_host: auto\n",
        2,
        "listen.worker_host: auto is not a loopback address and needs security.tls; set it, or ",
    ),
    "redis scheme": ("redis: {url: 'http://x'}\n", 1, "redis.url: not the URL of a Redis; allowed"),
    "word for TLS": (
        "security: {tls: a.pem}\n",
        1,
        "security.tls: must be a mapping with the keys ca, router, worker,",
    ),
    "TLS without a key": (
        "security:\n  tls:\n    ca: a\n    router: {cert: b}\n    worker: {cert: c, key: d}\n",
        4,
        "security.tls.router.key: is missing; the keys here are cert, key",
    ),
    "number for a file of tokens": (
        "security: {tokens_file: 7}\n",
        1,
        "security.tokens_file: must be a string, not 7",
    ),
    "empty section": (
        "model:\nkv:\n",
        1,
        "model: must be a mapping with the keys path, name, dtype",
    ),
    "policy file that is not there": (
        "a: 1\n".replace("a: 1", "autoscaling: no.yaml"),
        1,
        "autoscaling: ",
    ),
    "deep nesting": ("a: " + "[" * 100_000, 1, "nested deeper than 16 levels"),
    "more CPUs than any machine has": (
        "decode: {resources: {num_cpus: 1.0e+308}}\n",
        1,
        "decode.resources.num_cpus: must be at most 4096, not 1e+308",
    ),
    "more workers than a pool may have": (
        "decode: {replicas: 99999}\n",
        1,
        "decode.replicas: must be at most 1024, not 99999",
    ),
    "empty path": (
        "security: {tokens_file: ''}\n",
        1,
        "security.tokens_file: is empty; give a path, or leave the key out",
    ),
    "context of one token": (
        "model: {max_model_len: 1}\n",
        1,
        "model.max_model_len: must be at least 2, not 1",
    ),
    "port alone": (
        "listen: {http: 8000}\n",
        1,
        "listen.http: must be HOST:PORT, such as 127.0.0.1:8000, not 8000",
    ),
    "unclosed": ("kv: {block_size: 8\n", 2, "while parsing a flow mapping"),
    "tab": ("kv:\n\tblock_size: 8\n", 2, "a tab; YAML wants spaces"),
    "two documents": ("kv: {}\n---\nkv: {}\n", 2, "expected a single document in the stream"),
    "control character": ("kv: {}\n# \x07\n", 2, "character '\\x07' is not allowed in YAML"),
    "half a surrogate pair": (
        'model: {path: "\\ud800"}\n',
        1,
        "an escape that stands for no character",
    ),
    "NUL in a path": ('autoscaling: "a\\0b"\n', 1, "a line break or control character in a value"),
    "two lines": (
        "model:\n  path: |\n    a\n    b\n",
        2,
        "a line break or control character in a value",
    ),
    "beyond Unicode": (
        'model: {path: "\\U00110000"}\n',
        1,
        "an escape that stands for no character",
    ),
    "first of several": ("kv:\n  x: 1\nmodel:\n  y: 1\n", 2, "kv.x: unknown key"),
}

BAD_POLICIES = {
    "min above max": (
        "decode:\n  min_replicas: 3\n  max_replicas: 2\n",
        1,
        "decode: min_replicas 3 is above max_replicas 2",
    ),
    "zero maximum": (
        "prefill:\n  max_replicas: 0\n",
        2,
        "prefill.max_replicas: must be above 0, not 0",
    ),
    "negative minimum": (
        "prefill:\n  min_replicas: -1\n",
        2,
        "prefill.min_replicas: must be at least 0, not -1",
    ),
    "zero target": (POLICY % "0", 3, "prefill.metrics[0].target: must be above 0, not 0"),
    "target not a number": (
        POLICY % ".nan",
        3,
        "prefill.metrics[0].target: must be a finite number, not NaN",
    ),
    "unknown metric": (
        "prefill:\n  metrics:\n    - name: cpu\n      target: 1\n",
        3,
        "prefill.metrics[0].name: must be",
    ),
    "no target": (
        "prefill:\n  metrics:\n    - name: kv_occupancy\n",
        3,
        "prefill.metrics[0]: kv_occupancy needs a target; add target: NUMBER",
    ),
    "metrics as a mapping": (
        "prefill:\n  metrics: {name: x}\n",
        2,
        "prefill.metrics: must be a list, not a mapping",
    ),
    "unknown key": (
        POLICY % "1, weight: 2",
        3,
        "prefill.metrics[0].weight: unknown key; allowed are name, target",
    ),
    "unknown pool": ("encode: {}\n", 1, "encode: unknown key; did you mean decode?"),
    "tolerance": ("decode: {tolerance: 1}\n", 1, "decode.tolerance: must be below 1, not 1"),
    "interval": ("interval_s: -1\n", 1, "interval_s: must be at least 0.1, not -1"),
    "an interval of nothing": (
        "interval_s: 1.0e-12\n",
        1,
        "interval_s: must be at least 0.1, not 1e-12",
    ),
    "an empty pool that nothing wakes": (
        "prefill:\n  min_replicas: 0\n  metrics: [{name: ttft_p95_ms, target: 500}]\n",
        2,
        "prefill.min_replicas: 0 needs a metric that is known while the pool is empty; add "
        "queue_depth or queue_tokens to its metrics, or set 1 or more",
    ),
    "an empty decode pool": (
        "decode:\n  min_replicas: 0\n  metrics: [{name: kv_occupancy, target: 0.5}]\n",
        2,
        "decode.min_replicas: 0 needs a metric that is known while the pool is empty; add ",
    ),
    "a share as a percentage": (
        "decode: {metrics: [{name: queue_depth, target: 2}, {name: kv_occupancy, target: 80}]}\n",
        1,
        "decode.metrics[1].target: 80 with tolerance 0.1 never grows the pool, because "
        "kv_occupancy is a share of at most 1; set a target below 0.909",
    ),
    "a share that tolerance puts out of reach": (
        "decode: {tolerance: 0.25, metrics: [{name: kv_occupancy, target: 0.8}]}\n",
        1,
        "decode.metrics[0].target: 0.8 with tolerance 0.25 never grows the pool",
    ),
    "a delay of years": (
        "decode: {upscale_delay_s: 1.0e+9}\n",
        1,
        "decode.upscale_delay_s: must be at most 3600, not 1000000000.0",
    ),
    "a step beyond all pools": (
        "decode: {max_step_up: 1025}\n",
        1,
        "decode.max_step_up: must be at most 1024, not 1025",
    ),
    "delay": (
        "decode: {upscale_delay_s: .inf}\n",
        1,
        "decode.upscale_delay_s: must be a finite number, not Infinity",
    ),
}


@pytest.mark.parametrize(("text", "line", "says"), BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
def test_a_bad_file_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int, says: str
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.message.startswith(f"{path}:{line}: {says}"), caught.value.message
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        one
        for one in BAD_CONFIGS.values()
        if re.split(r"[.:\[]", one[2])[0] in ModelSections.model_fields
    ],
)
def test_a_bad_value_that_two_models_inherit_is_told_once_with_its_line(
    tmp_path: Path, text: str, line: int, says: str
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{text}\nmodels:\n  a: {{model: {{name: a}}}}\n  b: {{model: {{name: b}}}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.message.startswith(f"{path}:{line}: {says}"), caught.value.message
    told = [caught.value.message, *getattr(caught.value, "__notes__", ())]
    assert not [one for one in told if "models." in one]


@pytest.mark.parametrize(("text", "line", "says"), BAD_POLICIES.values(), ids=BAD_POLICIES.keys())
def test_a_bad_policy_is_refused_when_the_configuration_is_loaded(
    tmp_path: Path, text: str, line: int, says: str
) -> None:
    (tmp_path / "policies").mkdir()
    policy = tmp_path / "policies" / "policy.yaml"
    policy.write_text(text)
    config = tmp_path / "cluster.yaml"
    config.write_text("autoscaling: policies/policy.yaml\n")
    for load in (lambda: load_policy(policy), lambda: load_config(config)):
        with pytest.raises(ConfigError) as caught:
            load()
        assert caught.value.message.startswith(f"{policy}:{line}: {says}"), caught.value.message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file or directory; write it with `kvrelay profile"),
        ("folder", "is not a file"),
        ("pipe", "is not a file"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"{}", "not a profile"),
        (b"[" * 100_000, "not a profile"),
        (b" " * 2**21, "not a profile"),
        (b"zero", "its steps take no time"),
    ],
)
def test_a_profile_that_is_none(tmp_path: Path, content: object, says: str) -> None:
    profile = tmp_path / "profile.json"
    if content == "folder":
        profile.mkdir()
    elif content == "pipe":
        os.mkfifo(profile)
    elif content == b"zero":
        costs = StepCostModel(*[0.0] * 10, kind="measured")
        profile.write_text(json.dumps(Profile(costs, 1, 1, 1).to_json()))
    elif isinstance(content, bytes):
        profile.write_bytes(content)
    policy = tmp_path / "policy.yaml"
    policy.write_text("profile: profile.json\nprefill: {metrics: [{name: slo, ttft_ms: 500}]}\n")
    with pytest.raises(ConfigError) as caught:
        load_policy(policy)
    assert caught.value.message.startswith(f"{policy}:1: profile: {profile}")
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        ("{name: slo, ttft_ms: 500}", "slo needs the step costs of a worker; add profile: FILE"),
        ("{name: slo, itl_ms: 500}", "slo of the prefill pool needs ttft_ms"),
        ("{name: slo, ttft_ms: 0}", "ttft_ms: must be above 0"),
        ("{name: slo, ttft_ms: 500, target: 4}", "target: has no meaning for slo"),
        ("{name: queue_depth}", "queue_depth needs a target"),
        ("{name: queue_depth, target: 4, itl_ms: 4}", "itl_ms: has no meaning for queue_depth"),
    ],
)
def test_metrics_have_the_keys_of_their_kind(tmp_path: Path, metric: str, says: str) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"prefill: {{metrics: [{metric}]}}\n")
    with pytest.raises(ConfigError) as caught:
        load_policy(policy)
    assert caught.value.message.startswith(f"{policy}:1: prefill.metrics[0]")
    assert says in caught.value.message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    large = tmp_path / "large.yaml"
    large.write_bytes(b"# " + b"x" * 2**20)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"kv: {}\n\xff\n")
    for path, says in (
        (tmp_path / "none.yaml", ": cannot be read: No such file"),
        (tmp_path, ": is a folder; give the name of a YAML file"),
        (large, ":1: the file is larger than 1048576 bytes"),
        (binary, ":2: byte 0xff is not valid UTF-8"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(str(path) + says)}"):
            load_config(path)


def _load_or_config_error(path: Path) -> None:
    try:
        load_config(path)
    except ConfigError as error:
        message = error.message
    else:
        return
    assert message.startswith(f"{path}:")


@given(
    st.binary(max_size=300)
    | st.text(alphabet="kvblocksize: {}[]&*!-|>'\"\n#?%@0123.~\\U", max_size=100).map(str.encode)
)
def test_any_bytes_are_a_configuration_or_a_config_error(raw: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(raw)
        file.flush()
        _load_or_config_error(Path(file.name))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)
sections = st.sampled_from(list(ClusterConfig.model_fields))
keys = st.sampled_from(
    [
        key
        for name in ("kv", "decode", "router", "listen")
        for key in type(getattr(ClusterConfig(), name)).model_fields
    ]
)


@given(
    st.dictionaries(
        sections, st.dictionaries(keys, json_values, max_size=3) | json_values, max_size=3
    )
)
def test_any_values_are_a_configuration_or_a_config_error(data: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cluster.yaml")
        path.write_text(yaml.safe_dump(data))
        _load_or_config_error(path)


def test_default_yaml_spells_out_the_defaults() -> None:
    assert load_config(CONFIGS / "default.yaml") == ClusterConfig() == load_config(None)
    spelt_out = yaml.safe_load((CONFIGS / "default.yaml").read_text())
    assert _names(spelt_out) == _names(ClusterConfig().model_dump())


def _names(data: object) -> object:
    return {key: _names(value) for key, value in data.items()} if isinstance(data, dict) else None


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_load(path: Path) -> None:
    load_config(path)


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("autoscaling/*.yaml")), ids=lambda path: path.name
)
def test_shipped_policies_name_every_key(path: Path, tmp_path: Path) -> None:
    costs = StepCostModel(*[1e-3] * 10, kind="measured")
    (tmp_path / "profile.json").write_text(json.dumps(Profile(costs, 1, 1, 1).to_json()))
    policy = load_policy(Path(shutil.copy(path, tmp_path)))
    assert policy.prefill is not None
    assert policy.decode is not None
    spelt_out = yaml.safe_load(path.read_text())
    assert set(spelt_out) | {"profile"} == set(AutoscalingPolicy.model_fields)
    for pool in ("prefill", "decode"):
        assert set(spelt_out[pool]) == set(type(policy.prefill).model_fields)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("prefill: {weights: int8}\n", 2, "prefill.weights: differs between the pools"),
        (
            "prefill:\n  replicas: 2\ndecode:\n  threads: 2\n",
            5,
            "decode.threads: differs between the pools",
        ),
        ("decode: {resources: {num_gpus: 1}}\n", 2, "decode.resources: differs between the pools"),
        ("decode: {tensor_parallel: 2}\n", 2, "decode.tensor_parallel: differs between the pools"),
        (
            "prefill: {tensor_parallel: 2}\ndecode: {tensor_parallel: 2}\n",
            2,
            "prefill.tensor_parallel: is not 1, and",
        ),
    ],
)
@pytest.mark.parametrize(
    ("with_it", "without"), [("rebalance: true", "rebalance: false"), ("standby: 1", "standby: 0")]
)
def test_who_changes_over_keeps_its_process_so_the_pools_must_be_alike(
    tmp_path: Path, text: str, line: int, says: str, with_it: str, without: str
) -> None:
    (tmp_path / "policy.yaml").write_text(f"{with_it}\n")
    config = tmp_path / "cluster.yaml"
    config.write_text("autoscaling: policy.yaml\n" + text)
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert caught.value.message.startswith(f"{config}:{line}: {says}")
    assert with_it in caught.value.message
    assert without in caught.value.message
    (tmp_path / "policy.yaml").write_text(f"{without}\n")
    load_config(config)


def test_pools_with_unlike_kv_may_change_over(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("rebalance: true\n")
    config = tmp_path / "cluster.yaml"
    config.write_text(
        "autoscaling: policy.yaml\nprefill: {kv: {dtype: int8}, replicas: "
        "3}\ndecode: {max_batch: 4}\n"
    )
    load_config(config)


def test_the_policys_path_is_relative_to_the_file_and_comes_out_absolute(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("decode: {max_replicas: 3}\n")
    config = tmp_path / "cluster.yaml"
    config.write_text("autoscaling: policy.yaml\n")
    assert load_config(config).autoscaling == str(tmp_path / "policy.yaml")


def test_a_policy_named_by_an_option_is_relative_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy.yaml").write_text("decode: {max_replicas: 3}\n")
    monkeypatch.chdir(tmp_path)
    assert load_config(None, {"autoscaling": "policy.yaml"}).autoscaling == str(
        tmp_path / "policy.yaml"
    )
    with pytest.raises(ConfigError, match=r"^option: autoscaling: .*other\.yaml: cannot be read"):
        load_config(None, {"autoscaling": "other.yaml"})


def test_files_of_security_are_relative_to_the_configuration_and_come_out_absolute(
    tmp_path: Path,
) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(
        "security:\n"
        "  tls: {ca: certs/ca.pem, router: {cert: r.pem, key: /run/r.key}, worker: {cert: "
        "../w.pem, key: w.key}}\n"
        "  tokens_file: tokens.yaml\n"
    )
    security = load_config(config).security
    assert security.tls is not None
    assert security.tls.ca == str(tmp_path / "certs" / "ca.pem")
    assert security.tls.router == KeyPairConfig(cert=str(tmp_path / "r.pem"), key="/run/r.key")
    assert security.tls.worker.cert == str(tmp_path / ".." / "w.pem")
    assert security.tls.public is None
    assert security.tokens_file == str(tmp_path / "tokens.yaml")


def test_other_addresses_are_for_those_who_have_tls_and_tokens(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "security:\n  tls: {ca: a, router: {cert: a, key: a}, worker: {cert: a, key: a}}\n  "
        "tokens_file: t\n"
        "listen: {grpc: '0.0.0.0:1', http: '[::]:2', admin: 10.0.0.1:3}\n"
    )
    assert load_config(path).listen.http == "[::]:2"
    for exposed in (
        "grpc: '0.0.0.0:1'",
        "http: '[::]:2'",
        "admin: '10.0.0.1:3'",
        "worker_host: 10.0.0.1",
    ):
        path.write_text(f"listen: {{{exposed}}}\n")
        with pytest.raises(ConfigError, match=r"is not a loopback address and needs security\.tls"):
            load_config(path)


def test_a_commands_own_cluster_is_for_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "security: {tls: {ca: a, router: {cert: a, key: a}, worker: {cert: a, key: a}}, "
        "tokens_file: t}\n"
        "listen: {grpc: '0.0.0.0:1', http: '[::]:2', admin: 10.0.0.1:3, worker_host: auto}\n"
    )
    config = load_config(path, OWN_CLUSTER)
    assert config.security == SecurityConfig()
    assert config.listen.grpc == config.listen.http == config.listen.admin == "127.0.0.1:0"
    assert config.listen.workers_on_loopback


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    for text in ("", "# nothing\n", "---\n"):
        path.write_text(text)
        assert load_config(path) == ClusterConfig()


def test_values_in_the_forms_that_people_write(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "kv: {memory: 1.5 GiB, digest: off, prefix_cache: yes}\ntransfer: {lease_s: 1e1}\n"
    )
    config = load_config(path)
    assert config.kv.memory == 3 * 2**29
    assert config.kv.digest is False
    assert config.kv.prefix_cache is True
    assert config.transfer.lease_s == 10


@pytest.mark.parametrize("pool", ["prefill", "decode"])
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_weights_of_each_pool(pool: str, weights: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{pool}: {{weights: {weights}}}\n")
    config = load_config(path)
    expected = {"prefill": "auto", "decode": "auto", pool: weights}
    assert {"prefill": config.prefill.weights, "decode": config.decode.weights} == expected


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("prefill: {replicas: 2, threads: 2}\n")
    config = load_config(path, {"prefill.replicas": 3, "model.path": "demo"})
    assert (config.prefill.replicas, config.prefill.threads) == (3, 2)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"prefill.replicas": -1}, "--prefill: prefill.replicas: must be at least 0, not -1"),
        (
            {"decode.replicas": 0},
            "--decode: decode.replicas: 0 would leave nobody to generate tokens",
        ),
        (
            {"listen.grpc": "0.0.0.0:1"},
            "--grpc-port: listen.grpc: 0.0.0.0:1 is not a loopback address",
        ),
        ({"model.dtype": "int4"}, "option: model.dtype: must be 'auto', "),
        ({"kv.blocks": 1}, "option: kv.blocks: unknown key"),
    ],
    ids=str,
)
def test_a_bad_override_names_the_option(
    tmp_path: Path, overrides: dict[str, object], says: str
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("router: {max_queue: 5}\n")
    for file in (None, path):
        with pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
            load_config(file, overrides)


def test_an_override_into_a_broken_section_reports_the_files_error(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("prefill: 3\n")
    with pytest.raises(ConfigError, match=r"cluster\.yaml:1: prefill: must be a mapping"):
        load_config(path, {"prefill.replicas": 1})


@pytest.mark.parametrize(
    ("tiers", "problem"),
    [
        ("{kind: dsik, path: kv, size: 1GiB}", "did you mean disk?"),
        ("{kind: disk, pth: kv, size: 1GiB}", "unknown key; did you mean path?"),
        ("{kind: disk, path: kv}", "kv.tiers[0].size: is missing"),
        ("{kind: disk, size: 1GiB}", "path: is missing; a tier of kind disk needs a folder"),
        ("{kind: host, path: kv, size: 1GiB}", "path: has no meaning for a tier of kind host"),
        ("{kind: host, size: 0}", "kv.tiers[0].size: must be above 0"),
        ("{kind: host, size: 1GiB}, {kind: host, size: 1GiB}", "two tiers of kind host"),
        (
            "{kind: disk, path: kv, size: 1GiB}, {kind: host, size: 1GiB}",
            "kv.tiers[1].kind: the tier of kind host comes after disk",
        ),
        ("{kind: remote}", "kv.tiers[0].addresses: is missing; a tier of kind remote needs"),
        ("{kind: remote, addresses: [nowhere]}", "'nowhere' is not HOST:PORT"),
        ('{kind: remote, addresses: ["127.0.0.1:00"]}', "allowed are ports from 1 to 65535"),
        (
            '{kind: remote, addresses: ["127.0.0.1:1", "127.0.0.1:1"]}',
            "kv.tiers[0].addresses: names a store twice",
        ),
        (
            '{kind: remote, addresses: ["127.0.0.1:1"], size: 1GiB}',
            "kv.tiers[0].size: has no meaning for a tier of kind remote",
        ),
        (
            '{kind: remote, addresses: ["127.0.0.1:1"]}, {kind: disk, path: kv, size: 1GiB}',
            "kv.tiers[1].kind: the tier of kind disk comes after remote",
        ),
        (
            '{kind: remote, addresses: ["10.0.0.1:50061"]}',
            "10.0.0.1:50061 is not a loopback address and needs security.tls",
        ),
    ],
)
@pytest.mark.parametrize("section", ["kv: {%s}", "decode: {kv: {%s}}"])
def test_tiers_that_cannot_be(tmp_path: Path, tiers: str, problem: str, section: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(section % f"tiers: [{tiers}]")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert problem in caught.value.message
    assert caught.value.message.startswith(f"{file}:1: ")


def test_tiers_need_the_prefix_cache(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("kv: {prefix_cache: false, tiers: [{kind: host, size: 1GiB}]}")
    with pytest.raises(ConfigError, match="prefix_cache: true"):
        load_config(file)


def test_a_pool_has_tiers_of_its_own_and_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "kv: {tiers: [{kind: disk, path: kv, size: 1GiB}]}\n"
        "decode: {kv: {tiers: []}}\n"
        "prefill: {kv: {memory: 2GiB}}\n"
    )
    config = load_config(file)
    (tier,) = config.pool_kv("prefill").tiers
    assert (tier.kind, tier.path, tier.size) == ("disk", str(tmp_path / "kv"), 2**30)
    assert config.pool_kv("decode").tiers == ()
    assert ClusterConfig.model_validate(config.without_secrets()) == config
    changed = config.without_secrets(changed=True)
    assert ClusterConfig.model_validate(changed) == config


@pytest.mark.parametrize("load", [load_policy, load_tokens])
def test_a_file_that_is_a_pipe_is_not_waited_for(
    tmp_path: Path, load: Callable[[Path], object]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe: is not a regular file"):
        load(tmp_path / "pipe")


def test_the_configuration_may_come_through_a_pipe(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"decode: {replicas: 3}\n")
    os.close(writing)
    assert load_config(Path(f"/dev/fd/{reading}")).decode.replicas == 3
    os.close(reading)
