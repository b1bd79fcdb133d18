"""Tokens and certificates on the command line: they come from files, and go nowhere but to the
cluster.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scripted_router import ScriptedRouter, serving

from kvrelay.cli.main import run
from kvrelay.config.tokens_file import load_tokens

Output = pytest.CaptureFixture[str]


def test_a_new_token_and_its_line_go_together(tmp_path: Path, capsys: Output) -> None:
    assert run(["token", "new", "--tenant", "acme"]) == 0
    token, line = capsys.readouterr()
    assert token.startswith("kvr_")
    assert token.count("\n") == 1
    assert token.strip() not in line
    path = tmp_path / "tokens.yaml"
    path.write_text("tenants:\n" + line)
    ((digest, tenant),) = load_tokens(path).items()
    assert (tenant.name, tenant.roles) == ("acme", frozenset({"client"}))
    assert run(["token", "new", "--tenant", "ops", "--role", "admin", "--role", "client"]) == 0
    other, line = capsys.readouterr()
    assert other != token
    path.write_text("tenants:\n" + line)
    ((another, tenant),) = load_tokens(path).items()
    assert (tenant.name, tenant.roles) == ("ops", frozenset({"admin", "client"}))
    assert another != digest


@pytest.mark.parametrize(
    "arguments", [["--tenant", "a/b"], ["--tenant", ""], [], ["--tenant", "a", "--role", "root"]]
)
def test_a_bad_name_or_role_is_bad_usage(arguments: list[str], capsys: Output) -> None:
    assert run(["token", "new", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvrelay: ")


def test_generate_sends_what_the_file_holds(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("kvr_secret\n")
    router = ScriptedRouter()
    with serving(router) as target:
        assert (
            run(
                [
                    "generate",
                    "p",
                    "--target",
                    target,
                    "--max-tokens",
                    "2",
                    "--token-file",
                    str(file),
                ]
            )
            == 0
        )
        monkeypatch.setenv("KVRELAY_TOKEN_FILE", str(file))
        assert run(["generate", "p", "--target", target, "--max-tokens", "2"]) == 0
    assert [one["authorization"] for one in router.metadata] == ["Bearer kvr_secret"] * 2
    assert "kvr_secret" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        *(
            (content, "does not contain exactly one token")
            for content in ("", "kvr_a kvr_b", "kvr_secret\nkvr_b", "kvr_secret\u00e9")
        ),
        ("kvr_secret" * 10_000, "is larger than"),
    ],
)
@pytest.mark.parametrize(
    "command", [["generate", "p"], ["status"], ["scale", "decode=2"], ["drain", "decode-0"]]
)
def test_a_file_that_holds_no_token_is_bad_usage(
    tmp_path: Path, capsys: Output, content: str | None, message: str, command: list[str]
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    assert run([*command, "--token-file", str(file)]) == 2
    _, err = capsys.readouterr()
    assert f"--token-file {file} {message}" in err
    assert "kvr_" not in err


def test_certificates_go_together(tmp_path: Path, capsys: Output) -> None:
    assert run(["status", "--tls-cert", "a.pem"]) == 2
    assert "--tls-cert and --tls-key must be given together" in capsys.readouterr().err
    assert run(["status", "--tls-cert", "a.pem", "--tls-key", "b.pem"]) == 2
    assert "--tls-cert requires --tls-ca" in capsys.readouterr().err
    assert run(["status", "--tls-ca", str(tmp_path / "no.pem")]) == 2
    assert "--tls-ca" in capsys.readouterr().err
    (tmp_path / "bad.pem").write_text("no certificate")
    target = ["--target", "https://127.0.0.1:1", "--tls-ca", str(tmp_path / "bad.pem")]
    assert run(["loadtest", "run", *target]) == 2
    assert "contains no PEM certificate" in capsys.readouterr().err
