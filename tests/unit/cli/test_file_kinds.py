"""A file at an option that takes another kind of file: the error says what the file is, what the
option takes, and where the file belongs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest
import typer
from support import simulated

from kvrelay.cli.main import app, run
from kvrelay.cli.options.file_kinds import _KINDS, _TAKES, kind_of

ROOT = Path(__file__).resolve().parents[3]
TRACES = ROOT / "tests/unit/loadtest/traces"
REPORT = {"options": {"target": "t"}, "slos": [], "requests": [], "timeline": None}
# A command for each option and argument that takes a file, without the file.
COMMANDS = {
    "config": ["check", "-c"],
    "autoscaling": ["simulate", "--profile", "PROFILE", "--num-requests", "1", "--autoscaling"],
    "policy": ["autoscale", "explain", "--metrics", "METRICS"],
    "profile": ["simulate", "--num-requests", "1", "--profile"],
    "costs": ["plan", "llama-3.1-8b", "--costs"],
    "trace": ["plan", "llama-3.1-8b", "--trace"],
    "record": ["plan", "llama-3.1-8b", "--record"],
    "calibrate": ["simulate", "--profile", "PROFILE", "--num-requests", "1", "--calibrate"],
    "explain metrics": ["autoscale", "explain", "POLICY", "--metrics"],
    "plan model": ["plan"],
    "plan draft": ["plan", "llama-3.1-8b", "--draft"],
    "report file": ["loadtest", "report"],
    "first": ["loadtest", "compare", "REPORT"],
    "second": ["loadtest", "compare", "REPORT"],
    "token_file": ["status", "--admin", "127.0.0.1:1", "--token-file"],
    "tls_ca": ["status", "--admin", "127.0.0.1:1", "--tls-ca"],
    "tls_cert": [*("status", "--tls-ca", "PEM", "--tls-key", "PEM"), "--tls-cert"],
    "tls_key": [*("status", "--tls-ca", "PEM", "--tls-cert", "PEM"), "--tls-key"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One file of each kind, as kvrelay's own commands and folders have it."""
    folder = tmp_path_factory.mktemp("kinds")
    profile = simulated.profile().to_json()
    texts = {
        "configuration": (ROOT / "configs/default.yaml").read_text(),
        "policy": (ROOT / "configs/autoscaling/queue-depth.yaml").read_text(),
        "tenants": "tenants:\n  - name: acme\n    tokens_sha256: []\n",
        "token": "kvr_abcdef\n",
        "pem": "-----BEGIN CERTIFICATE-----\nMII=\n-----END CERTIFICATE-----\n",
        "model": (ROOT / "kvrelay/models/demo/config.json").read_text(),
        "profile": json.dumps(profile),
        "costs": json.dumps(profile["costs"]),
        "report": json.dumps({"format": "kvrelay-loadtest-1", **REPORT}),
        "sweep": json.dumps({"format": "kvrelay-loadtest-sweep-1"}),
        "plan": json.dumps({"format": "kvrelay-plan-1", "model": {}}, indent=2),
        "simulation": json.dumps({"format": "kvrelay-simulation-sweep-1"}),
        "trace": (TRACES / "mooncake_conversation_60.jsonl").read_text(),
        "metrics": "seconds,pool,size,ready,queue_depth\n0,prefill,1,1,0\n",
    }
    for kind, text in texts.items():
        (folder / kind).write_text(text)
    return {kind: folder / kind for kind in texts}


def test_each_kind_is_recognised(files: dict[str, Path], tmp_path: Path) -> None:
    assert set(files) == set(_KINDS)
    assert {kind: kind_of(file) for kind, file in files.items()} == {kind: kind for kind in files}
    azure = tmp_path / "azure.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    assert kind_of(azure) == "trace"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "prefill: {}\n",
        "decode: {replicas: 2, metrics: []}\n",
        "intervall_s: 1\n",
        "- 1\n",
        "{}",
        '{"a": 1',
        "[1]",
        "Once upon a time",
        "a: [",
        "\0",
    ],
)
def test_a_file_that_could_be_several_kinds_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    assert kind_of(tmp_path / "file") is None
    assert kind_of(tmp_path) is None


@pytest.mark.sweep(4)
@pytest.mark.parametrize("taker", list(_TAKES))
def test_a_file_at_the_wrong_option_is_told(
    taker: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, file in files.items():
        if kind in _TAKES[taker]:
            continue
        words = [str(files[word.lower()]) if word.isupper() else word for word in COMMANDS[taker]]
        line = (
            [*words[:2], str(file), *words[2:]]
            if taker in ("policy", "first")
            else [
                *words,
                str(file),
            ]
        )
        assert run(line) == 2, (line, capsys.readouterr().err)
        error = capsys.readouterr().err
        what, place = _KINDS[kind]
        assert error.startswith(f"kvrelay: {file} is {what}, and "), error
        assert f" takes {_KINDS[_TAKES[taker][0]][0]}" in error
        assert error.endswith(f"; {place}\n")


@pytest.mark.parametrize(
    ("words", "writer"),
    [
        (["loadtest", "report"], "kvrelay loadtest run --json FILE` writes the report of a load"),
        (["simulate", "--profile"], "kvrelay profile --json FILE` writes the profile of a worker"),
        (["plan", "demo", "--costs"], "kvrelay plan MODEL --step-costs FILE` writes step costs"),
    ],
)
def test_a_file_that_is_missing_is_told_with_its_writer(
    words: list[str], writer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing.json"
    assert run([*words, str(missing)]) == 2
    assert capsys.readouterr().err.startswith(f"kvrelay: {missing}: No such file; `{writer}")


def test_another_error_is_told_as_it_is(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(files["configuration"], tmp_path / "cluster.yaml")
    with (tmp_path / "cluster.yaml").open("a") as file:
        file.write("nonsense: 1\n")
    assert run(["check", "-c", str(tmp_path / "cluster.yaml")]) == 2
    assert "nonsense: unknown key" in capsys.readouterr().err


def test_each_file_that_a_command_reads_has_a_kind() -> None:
    """A new option for a file must say what it takes."""
    others = {
        # Written, or of any content.
        *("--json", "--html", "--step-costs", "--file"),
    }
    found = {
        f"{command.name} {param.name}"
        for command in _commands(typer.main.get_command(app))
        for param in command.params
        if param.metavar == "FILE" and not others & set(param.opts)
    }
    takers = {taker.rpartition(" ")[2] for taker in _TAKES}
    assert {name for name in found if name.rpartition(" ")[2] not in takers} == set()


def test_each_option_with_a_value_has_a_word_for_it() -> None:
    """Otherwise the help shows the name of a type, unless that is a choice of words."""
    assert [
        f"{command.name} {param.name}"
        for command in _commands(typer.main.get_command(app))
        for param in command.params
        if param.param_type_name == "option" and not param.hidden
        if param.metavar is None and not param.is_flag
        if get_origin(param.type_descriptor.annotation) is not Literal
    ] == []


def _commands(group: Any) -> list[Any]:
    inner: dict[str, Any] = getattr(group, "commands", {})
    return [one for command in inner.values() for one in _commands(command)] if inner else [group]
