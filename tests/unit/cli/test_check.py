"""`kvrelay check` and `kvrelay version`: what they print, and how they exit."""

from __future__ import annotations

import json
import platform
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import BloomConfig, BloomForCausalLM

import kvrelay
from kvrelay.cli.main import run
from kvrelay.config.config_file import load_config
from kvrelay.config.redis_url import without_password
from kvrelay.config.schema import ClusterConfig
from kvrelay.launch.checks import engine_check
from kvrelay.models import resolve_model
from kvrelay.planning.quantity import decimal_bytes
from kvrelay.process.machine import Machine
from kvrelay.types.workers import POOLS

Output = pytest.CaptureFixture[str]
FREE_PORTS = "listen: {grpc: 127.0.0.1:0, http: 127.0.0.1:0, admin: 127.0.0.1:0}\n"
WORD = st.text("abcXYZ019-_.", min_size=1, max_size=8)


@pytest.fixture(autouse=True, scope="module")
def asked_once() -> Iterator[None]:
    """Asks transformers once about each model: a process that imports it takes seconds."""
    ask, answered = engine_check._ask, set[tuple[object, ...]]()

    def asked(config: ClusterConfig, *which: Any) -> None:
        key = (config.model.path, *(config.pool(pool).tensor_parallel for pool in POOLS), *which)
        if key not in answered:
            ask(config, *which)
            answered.add(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_check, "_ask", asked)
        yield


@pytest.mark.long
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.sweep(2)
def test_the_effective_configuration_is_one_that_loads(
    tmp_path: Path, capsys: Output, every: bool
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"{FREE_PORTS}kv: {{memory: 64MiB}}\ndecode: {{weights: int8, replicas: 3}}\n")
    assert run(["check", "-c", str(file), *(["--all"] if every else [])]) == 0
    shown, _, rest = capsys.readouterr().out.partition("\n\n")
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    assert load_config(again) == load_config(file)
    assert yaml.safe_load(shown)["kv"]["memory"] == "64MiB"
    decode = yaml.safe_load(shown)["decode"]
    assert decode["max_batch"] == 32 if every else decode == {"weights": "int8", "replicas": 3}
    assert rest.startswith(f"This machine: {Machine.here()}")
    assert rest.endswith("Ready to serve.\n")


@pytest.mark.long
def test_a_model_that_no_router_would_serve(tmp_path: Path, capsys: Output) -> None:
    model = BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    BloomForCausalLM(model).save_pretrained(tmp_path)
    file = tmp_path / "cluster.yaml"
    file.write_text(f"{FREE_PORTS}model: {{path: {tmp_path}}}\nkv: {{memory: 64MiB}}\n")
    assert run(["check", "-c", str(file)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "the model names no longest sequence; set model.max_model_len" in shown


def test_all_bad_values_of_a_file_are_told_at_once(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("prefill: {replicas: -1}\nkv:\n  memory: much\n  blocksize: 8\n")
    assert run(["check", "-c", str(file)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"also {file}:3: kv.memory: 'much' is not a size")
    assert said[1].startswith(f"also {file}:4: kv.blocksize: unknown key; did you mean block_size?")
    assert said[2:] == [f"kvrelay: {file}:1: prefill.replicas: must be at least 0, not -1"]


@pytest.mark.long
def test_weights_in_memory_and_those_of_a_plan_are_told_apart(
    tmp_path: Path, capsys: Output
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(FREE_PORTS)
    assert run(["check", "-c", str(file), "--prefill", "2"]) == 0
    shown = capsys.readouterr().out
    assert run(["plan", "demo", "--json"]) == 0
    planned = decimal_bytes(json.loads(capsys.readouterr().out)["memory"]["weight_bytes"])
    line = f"Weights of 8.1 MiB: 7.1 MiB ({planned}) of the model, and 1 MiB for a copy of"
    assert shown.count(line) == 1
    file.write_text(
        f"{FREE_PORTS}prefill: {{tensor_parallel: 2}}\ndecode: {{tensor_parallel: 2}}\n"
    )
    run(["check", "-c", str(file)])
    assert "Weights of" not in capsys.readouterr().out


def test_json_has_the_same(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(FREE_PORTS)
    assert run(["check", "-c", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problem"] is None
    assert found["machine"]["cores"] == Machine.here().cores
    assert [one["pool"] for one in found["memory"]] == ["prefill", "decode"]
    assert found["memory"][1]["kv_tokens"] == 419_424
    assert found["configuration"] == load_config(file).model_dump(mode="json")


def test_a_cluster_that_would_not_start(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gpu.yaml"
    file.write_text(f"{FREE_PORTS}decode: {{resources: {{num_gpus: 1}}}}\n")
    without = replace(Machine.here(), gpus=())
    monkeypatch.setattr(Machine, "here", lambda: without)
    assert run(["check", "-c", str(file)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "Not ready: resources.num_gpus: the workers need 1 GPUs" in shown
    assert "and kvrelay's own engine needs flashinfer on a GPU" in shown


def test_a_gpu_that_nobody_uses_is_mentioned(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(FREE_PORTS)
    with_gpu = replace(Machine.here(), gpus=("NVIDIA H100",))
    monkeypatch.setattr(Machine, "here", lambda: with_gpu)
    assert run(["check", "-c", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "GiB, NVIDIA H100\n" in shown
    assert "The workers use no GPU; set engine: vllm and" in shown


def test_a_port_in_use_or_given_twice_is_found(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "cluster.yaml"

    def problem(listen: str) -> str:
        file.write_text(listen)
        assert run(["check", "-c", str(file)]) == 1
        return " ".join(capsys.readouterr().out.split()).rpartition("Not ready: ")[2]

    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        listen = FREE_PORTS.replace("http: 127.0.0.1:0", f"http: {address}")
        found = problem(listen)
        assert found.startswith(f"listen.http: cannot listen on {address}: ")
        assert "if a cluster runs already, use it or stop it; otherwise set listen.http" in found
        with socket.create_server(("127.0.0.1", 0)) as third:
            more = f"127.0.0.1:{third.getsockname()[1]}"
            assert problem(listen.replace("grpc: 127.0.0.1:0", f"grpc: {more}")) == (
                f"listen.grpc, listen.http: cannot listen on {more}, {address}: Address already in "
                "use; if a cluster runs already, use it or stop it; otherwise set listen.grpc "
                "(--grpc-port), listen.http (--http-port) to free ports or to 0."
            )
    # On one port, also if the two addresses only mean the same.
    for admin in (address, address.replace("127.0.0.1", "localhost")):
        found = problem(listen.replace("admin: 127.0.0.1:0", f"admin: {admin}"))
        assert found.startswith(f"listen.admin: {admin} is listen.http too")
        assert "--admin-port" in found


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("model: {max_model_len: 100000}", "model.max_model_len: 100000 is more than the 4096"),
        ("redis: {url: 'redis://127.0.0.1:1'}", "redis.url: Redis at 127.0.0.1:1: Error"),
    ],
)
def test_what_serve_would_refuse(tmp_path: Path, capsys: Output, config: str, words: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"{FREE_PORTS}{config}\n")
    assert run(["check", "-c", str(file)]) in (1, 2)
    said = capsys.readouterr()
    assert words in " ".join((said.out + said.err).split())


def test_all_problems_are_told(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "cluster.yaml"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        listen = FREE_PORTS.replace("http: 127.0.0.1:0", f"http: 127.0.0.1:{port}")
        file.write_text(f"{listen}kv: {{memory: 9000GiB}}\n")
        assert run(["check", "-c", str(file), "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert [one.partition(":")[0] for one in problems] == ["listen.http", "kv.memory"]


@pytest.mark.long
def test_what_can_start_but_is_hardly_meant(tmp_path: Path, capsys: Output) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for one in Path(resolve_model("demo")).iterdir():
        if one.name != "tokenizer.json":
            shutil.copy(one, model)
    file = tmp_path / "cluster.yaml"
    file.write_text(f"{FREE_PORTS}model: {{path: {model}}}\nprefill: {{threads: 500}}\n")
    assert run(["check", "-c", str(file)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Warning: prefill.threads is 500, and this machine has" in shown
    assert "has no tokenizer.json: the model takes token_ids and no text" in shown


def test_the_largest_pools_of_the_policy_are_counted(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = "metrics: [{name: queue_depth, target: 4}]"
    (tmp_path / "policy.yaml").write_text(
        f"prefill: {{max_replicas: 3, {metrics}}}\ndecode: {{max_replicas: 8, {metrics}}}\n"
        "standby: 2\n"
    )
    file = tmp_path / "cluster.yaml"
    file.write_text(f"{FREE_PORTS}kv: {{memory: 64MiB}}\nautoscaling: policy.yaml\n")

    def checked(memory: int, *options: str) -> str:
        machine = replace(Machine.here(), memory_bytes=memory)
        monkeypatch.setattr(Machine, "here", lambda: machine)
        assert run(["check", "-c", str(file), *options]) == 0
        return capsys.readouterr().out

    found = json.loads(checked(64 * 2**30, "--json"))
    assert found["largest"]["sizes"] == {"prefill": 3, "decode": 8}
    assert found["largest"]["standby"] == 2
    each = {one["pool"]: one["kv_bytes"] + one["weight_bytes"] for one in found["memory"]}
    process = 400 * 2**20
    expected = 3 * (each["prefill"] + process) + 10 * (each["decode"] + process)
    assert found["largest"]["num_bytes"] == expected
    assert found["warning"] is None
    shown = checked(64 * 2**30)
    assert "Largest pools that policy.yaml allows: prefill 3, decode 8, standby 2; at" in shown
    assert "Warning" not in shown
    for memory, warns in ((expected, False), (expected - 1, True)):
        shown = " ".join(checked(memory).split())
        assert ("Warning: the largest pools (prefill 3, decode 8, standby 2)" in shown) == warns
        assert ("lower max_replicas or standby in policy.yaml, or kv.memory" in shown) == warns


@pytest.mark.parametrize("arguments", [["-c", "{file}"], ["--model", "/no/such/folder"]])
def test_a_bad_configuration_is_one_line(
    arguments: list[str], tmp_path: Path, capsys: Output
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("kv: {memroy: 1GiB}\n")
    assert run(["check", *(one.format(file=file) for one in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("kvrelay: ")


@given(user=st.just("") | WORD, password=WORD, query=st.booleans())
def test_no_password_of_redis_is_shown(user: str, password: str, query: bool) -> None:
    password = f"pw{password}"
    url = f"redis://{user}:{password}@host:6379/0"
    if query:
        url += f"?password={password}&db=1"
    assert password not in without_password(url)
    assert without_password(url).startswith(f"redis://{user}:***@host:6379/0")


@pytest.mark.parametrize("url", ["embedded", "redis://h:1/0", "unix:///a/b", "redis://user@h/1"])
def test_a_url_without_a_password_stays(url: str) -> None:
    assert without_password(url) == url


def test_versions(capsys: Output) -> None:
    assert run(["version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kvrelay"] == kvrelay.__version__
    assert found["python"] == platform.python_version()
    assert run(["version"]) == 0
    shown = capsys.readouterr().out
    assert all(value in shown for value in found.values())


def test_the_options_are_those_of_serve(tmp_path: Path, capsys: Output) -> None:
    ports = [f"--{one}-port=0" for one in ("grpc", "http", "admin")]
    assert run(["check", "demo", "--prefill", "2", "--decode", "3", *ports, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["configuration"]
    assert (shown["prefill"]["replicas"], shown["decode"]["replicas"]) == (2, 3)
    assert shown["listen"]["grpc"] == "127.0.0.1:0"


def test_stores_that_are_down_are_named(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "cluster.yaml"
    with socket.create_server(("127.0.0.1", 0)) as up, socket.socket() as down:
        down.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in (up, down)]
        file.write_text(f"{FREE_PORTS}kv: {{tiers: [{{kind: remote, addresses: {addresses}}}]}}\n")
        assert run(["check", "-c", str(file)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Nothing listens at {addresses[1]} now." in said
    assert f"at {addresses[0]} now" not in said
