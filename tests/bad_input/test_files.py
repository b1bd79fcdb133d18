"""Files of users that are bad: what the command says, and its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.cli.main import run

CONFIGS = {
    "unknown key": ("kv:\n  blocksize: 8\n", 2),
    "repeated key": ("kv: {}\nkv: {}\n", 2),
    "tag": ("a: 1\nb: !!python/object/apply:os.system [id]\n", 2),
    "alias bomb": ("a: &a [x, x]\nb: [*a, *a]\n", 1),
    "zero": ("router: {max_queue: 0}\n", 1),
    "negative": ("kv: {}\nrouter: {max_queue: -3}\n", 2),
    "not a number": ("transfer: {lease_s: .nan}\n", 1),
    "bare off": ("transfer:\n  transport: off\n", 2),
    "control character": ('model: {path: "\\e[2J"}\n', 1),
    "bad policy": ("autoscaling: policy.yaml\n", None),
}


@pytest.mark.parametrize(("text", "line"), CONFIGS.values(), ids=CONFIGS.keys())
def test_the_command_ends_with_2_and_one_line_that_names_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, line: int | None
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("decode:\n  min_replicas: 3\n  max_replicas: 2\n")
    config = tmp_path / "cluster.yaml"
    config.write_text(text)
    assert run(["serve", "-c", str(config)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    place = f"{policy}:1" if line is None else f"{config}:{line}"
    assert said.err.startswith(f"kvrelay: {place}: "), said.err
    assert said.err.count("\n") == 1
    assert said.err[:-1].isprintable()
