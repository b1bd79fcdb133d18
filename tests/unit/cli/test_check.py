"""`kvrelay check` and `kvrelay version`: what they print, and how they exit."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import kvrelay
from kvrelay.cli.main import run
from kvrelay.config.config_file import load_config
from kvrelay.config.redis_url import without_password
from kvrelay.process.machine import Machine

Output = pytest.CaptureFixture[str]
WORD = st.text("abcXYZ019-_.", min_size=1, max_size=8)


def test_the_effective_configuration_is_one_that_loads(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("kv: {memory: 64MiB}\ndecode: {weights: int8, replicas: 3}\n")
    assert run(["check", "-c", str(file)]) == 0
    shown, _, rest = capsys.readouterr().out.partition("\n\n")
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    assert load_config(again) == load_config(file)
    assert yaml.safe_load(shown)["decode"]["max_batch"] == 32
    assert rest.startswith(f"This machine: {Machine.here()}")
    assert rest.endswith("Ready to serve.\n")


def test_json_has_the_same(tmp_path: Path, capsys: Output) -> None:
    assert run(["check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problem"] is None
    assert found["machine"]["cores"] == Machine.here().cores
    assert [one["pool"] for one in found["memory"]] == ["prefill", "decode"]
    assert found["memory"][1]["kv_tokens"] == 419_424
    assert found["configuration"] == load_config(None).model_dump(mode="json")


def test_a_cluster_that_would_not_start(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gpu.yaml"
    file.write_text("decode: {resources: {num_gpus: 1}}\n")
    without = replace(Machine.here(), gpus=())
    monkeypatch.setattr(Machine, "here", lambda: without)
    assert run(["check", "-c", str(file)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Not ready: resources.num_gpus: the workers need 1 GPUs")


def test_a_gpu_that_nobody_uses_is_mentioned(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu = replace(Machine.here(), gpus=("NVIDIA H100",))
    monkeypatch.setattr(Machine, "here", lambda: with_gpu)
    assert run(["check"]) == 0
    shown = capsys.readouterr().out
    assert "GiB, NVIDIA H100\n" in shown
    assert "The workers use no GPU; set prefill.resources.num_gpus" in shown


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
