"""What reaches vLLM's engine, and what does not."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvrelay.config.config_file import load_config
from kvrelay.config.engine import RESERVED
from kvrelay.config.listen import ListenConfig
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError
from kvrelay.launch.checks.memory_plan import plan_memory
from kvrelay.launch.checks.preflight import check_machine, machine_problems
from kvrelay.types.workers import POOLS
from kvrelay.vllm_engine import arguments, model_check, version_check
from kvrelay.vllm_engine.arguments import check_names, engine_arguments, set_variables

BOTH = "prefill: {engine: vllm}\ndecode: {engine: vllm}\n"


def config(**decode: object) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {"prefill": {"engine": "vllm"}, "decode": {"engine": "vllm", **decode}}
    )


def test_engine_args_are_passed_on_beside_kvrelays_own() -> None:
    made = engine_arguments(
        config(engine_args={"enforce_eager": True, "quantization": "awq"}, max_batch=4),
        "decode",
        "/model",
    )
    assert (made["enforce_eager"], made["quantization"]) == (True, "awq")
    assert (made["max_num_seqs"], made["max_num_batched_tokens"]) == (4, 260)
    assert made["model"] == "/model"


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_vllm_runs_no_code_that_a_model_or_a_file_names(pool: str) -> None:
    made = engine_arguments(config(), pool, "/model")  # type: ignore[arg-type]
    assert made["trust_remote_code"] is False
    assert not made["async_scheduling"], "samples depend on the tokens before them"


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_reserved_arguments_are_refused_with_a_reason(tmp_path: Path, name: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"prefill: {{engine: vllm}}\ndecode:\n  engine: vllm\n  engine_args: {{{name}: 1}}\n"
    )
    with pytest.raises(
        ConfigError, match=rf"cluster.yaml:\d: decode.engine_args: {name} (is|runs)"
    ):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("decode: {engine: vllm}", "cluster.yaml:1: prefill.engine: native cannot hand over"),
        ("prefill: {engine: vllm}", "prefill.engine: vllm cannot hand over"),
        ("decode: {engine_args: {enforce_eager: true}}", "has no meaning for decode.engine native"),
        (BOTH.replace("decode: {", "decode: {tensor_parallel: 2, "), "decode.tensor_parallel"),
        (BOTH.replace("decode: {", "decode: {weights: int8, "), "decode.weights"),
        (BOTH + "kv: {dtype: int8}", "kv.dtype"),
        (BOTH.replace("decode: {", "decode: {speculation: {}, "), "decode.speculation"),
        (BOTH.replace("decode: {", "decode: {kv: {block_size: 64}, "), "kv.block_size"),
        (BOTH.replace("decode: {", "decode: {engine_args: [], "), "must be a mapping"),
        (BOTH.replace("decode: {", "decode: {engine_args: {--x: 1}, "), "is not the name of an"),
        (
            "transfer: {transport: vllm-nixl}",
            "cluster.yaml:1: transfer.transport: vllm-nixl needs engine: vllm in both pools",
        ),
        (
            BOTH.replace("prefill: {", "prefill: {replicas: 0, ")
            + "transfer: {transport: vllm-nixl}",
            "transfer.transport: vllm-nixl needs a prefill pool",
        ),
        ("prefill: {engine: sglang}", "must be 'native' or 'vllm'"),
    ],
)
def test_values_of_the_other_engine_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    assert message in refused.value.message


def test_vllm_moves_the_kv_itself_if_it_is_asked_to() -> None:
    """All of kv.memory is then vLLM's, and prompts are held as long as a lease lasts."""
    by_vllm = ClusterConfig.model_validate(
        {
            "prefill": {"engine": "vllm"},
            "decode": {"engine": "vllm"},
            "kv": {"memory": "1GiB"},
            "transfer": {"transport": "vllm-nixl", "lease_s": 6.5},
        }
    )
    prefill, decode = (engine_arguments(by_vllm, pool, "/model") for pool in POOLS)
    assert prefill["kv_cache_memory_bytes"] == decode["kv_cache_memory_bytes"] == 2**30
    assert engine_arguments(config(), "decode", "/model")["kv_cache_memory_bytes"] < 2**30
    connectors = [made["kv_transfer_config"] for made in (prefill, decode)]
    assert [one["kv_role"] for one in connectors] == ["kv_producer", "kv_consumer"]
    for one in connectors:
        assert one["kv_connector"] == "NixlHandoffConnector"
        assert one["kv_load_failure_policy"] == "recompute", "never other tokens"
        assert one["kv_connector_extra_config"]["kv_lease_duration"] == 7


NAMES_CODE = [
    {"backend": "pwned.compile"},
    {"post_grad_custom_post_pass": "os.system"},
    {"inductor_passes": {"mine": "pwned.run"}},
    {"reasoning_parser_plugin": "/tmp/evil.py"},
    {"encoder_cache_manager_cls": "pwned.Manager"},
]


@given(
    st.sampled_from(NAMES_CODE),
    st.lists(st.sampled_from(["list", "inner", "other"]), max_size=5),
    st.sampled_from(["compilation_config", "structured_outputs_config", "additional_config"]),
)
def test_values_that_name_code_are_refused_at_any_depth(
    value: Any, wraps: list[str], argument: str
) -> None:
    for wrap in wraps:
        value = [1, value] if wrap == "list" else {wrap: value, "mode": 1}
    with pytest.raises(ValidationError, match=f"{argument}.*runs code that the configuration"):
        config(engine_args={argument: value})


@pytest.mark.parametrize(
    "arguments",
    [
        {"compilation_config": {"backend": "inductor", "mode": 3, "custom_ops": ["+rms_norm"]}},
        {"hf_overrides": {"rope_parameters": {"factor": 2.0}}},
        {"compilation_config": {"pass_config": {"fuse_norm_quant": True}}},
    ],
)
def test_values_that_name_no_code_pass(arguments: Any) -> None:
    config(engine_args=arguments)


@pytest.mark.parametrize(
    ("replicas", "transport", "refused"),
    [(1, "auto", True), (0, "auto", False), (1, "vllm-nixl", False)],
)
def test_a_quarter_of_the_memory_has_to_hold_a_sequence_where_it_holds_kv_on_its_way(
    replicas: int, transport: str, refused: bool
) -> None:
    """`check` says so, as a worker would."""
    made = ClusterConfig.model_validate(
        {
            "listen": dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0"),
            "kv": {"memory": "36MiB", "block_size": 32},
            "prefill": {"engine": "vllm", "replicas": replicas},
            "decode": {"engine": "vllm"},
            "transfer": {"transport": transport},
        }
    )
    pools = plan_memory(made)
    cache = {one.pool: one.cache_bytes for one in pools}["decode"]
    assert cache == (27 if refused else 36) * 2**20
    found = [one for one in machine_problems(made) if "a quarter of the" in one]
    assert bool(found) is refused


def test_nixl_that_lacks_a_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise ImportError("libucp.so.0: cannot open shared object file")

    monkeypatch.setattr(model_check.importlib, "import_module", fails)
    with pytest.raises(ConfigError, match=r"vllm-nixl: .*libucp.so.0.*set transfer.transport"):
        model_check._import_nixl()


def test_an_unknown_argument_is_named_with_a_near_one() -> None:
    with pytest.raises(ConfigError, match=r"enforce_eagre .*; did you mean enforce_eager\?"):
        check_names(["enforce_eagre"], ["enforce_eager", "seed"], "decode")
    check_names(["seed"], ["enforce_eager", "seed"], "decode")


def test_standby_workers_and_pool_switches_are_refused() -> None:
    bound = config().bound_to_pools
    assert bound is not None
    assert bound[0] == "engine"


def test_the_remedy_for_standby_workers_is_another_engine(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(
        "standby: 1\n"
        + "".join(
            f"{pool}: {{min_replicas: 1, max_replicas: 2, "
            "metrics: [{name: queue_depth, target: 2}]}\n"
            for pool in POOLS
        )
    )
    file = tmp_path / "cluster.yaml"
    file.write_text(BOTH + "autoscaling: policy.yaml\n")
    with pytest.raises(ConfigError, match="set engine: native, or set standby: 0"):
        load_config(file)


def test_forced_variables_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
    monkeypatch.setattr(arguments.os, "environ", environment)
    set_variables()
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"


@pytest.mark.parametrize("found", ["0.31.2", "0.33.0", "1.32.0", "0.3", "0.320.1", "junk"])
def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(version_check, "find_spec", lambda _: object())
    monkeypatch.setattr(version_check, "version", lambda _: found)
    with pytest.raises(ConfigError, match=f"and {found} is installed"):
        version_check.check_version()


@pytest.mark.parametrize("found", ["0.32.0", "0.32.4+cpu", "0.32.1.dev3"])
def test_the_supported_release_is_taken(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(version_check, "find_spec", lambda _: object())
    monkeypatch.setattr(version_check, "version", lambda _: found)
    assert version_check.check_version() == found


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_missing_vllm_is_refused(monkeypatch: pytest.MonkeyPatch, has_folder: bool) -> None:
    """Also if a folder of that name is all that there is."""

    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(version_check, "find_spec", lambda _: object() if has_folder else None)
    monkeypatch.setattr(version_check, "version", missing)
    with pytest.raises(ConfigError, match="which is not installed"):
        version_check.check_version()


def test_a_machine_without_vllm_is_found_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(version_check, "find_spec", lambda _: None)
    listen = ListenConfig(grpc="127.0.0.1:0", http="127.0.0.1:0", admin="127.0.0.1:0")
    on_free_ports = config().model_copy(update={"listen": listen})
    with pytest.raises(ConfigError, match="which is not installed"):
        check_machine(on_free_ports, is_local=True)
    check_machine(on_free_ports, is_local=False)
