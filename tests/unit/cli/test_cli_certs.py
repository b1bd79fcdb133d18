"""`kvrelay certs`: what it writes can be pasted and used."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from kvrelay.cli.main import run
from kvrelay.config.config_file import load_config
from kvrelay.security.credentials import Credentials
from kvrelay.security.tls_roles import ROLES, dns_names, roles_of

Output = pytest.CaptureFixture[str]


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_the_section_that_it_prints_serves(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        run(
            [
                "certs",
                "some, certs",
                "--host",
                "inference.example.org",
                "--host",
                "10.0.0.7",
                "--days",
                "3",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert list(yaml.safe_load(printed)["security"]["tls"]) == ["ca", "router", "worker"]
    (tmp_path / "elsewhere").mkdir()
    config = tmp_path / "elsewhere" / "cluster.yaml"
    config.write_text(printed)
    security = load_config(config).security
    for credentials in (
        Credentials.internal(security, "router"),
        Credentials.internal(security, "worker"),
        Credentials.public(security),
    ):
        assert credentials is not None
        assert (
            "expires in 2 days" in credentials.trouble()
            or "expires in 3 days" in credentials.trouble()
        )


def test_it_needs_nothing_of_the_cluster(tmp_path: Path) -> None:
    """With the client and cryptography alone."""
    program = (
        "import sys; from kvrelay.cli.main import run\n"
        "absent = ['torch', 'transformers', 'ray', 'redis', 'yaml', 'xxhash']\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        "sys.exit(run(['certs', sys.argv[1]]))"
    )
    folder = tmp_path / 'a "b" \u00e9: #'
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    tls = yaml.safe_load(done.stdout)["security"]["tls"]
    assert tls["worker"]["key"] == str(folder / "worker-key.pem")


def test_each_role_has_its_own_and_only_its_user_can_read_them(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "certs"
    assert run(["certs", str(folder), "--host", "inference.example.org", "--host", "10.0.0.7"]) == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{name}{part}.pem" for name in ("ca", *ROLES) for part in ("", "-key")
    )
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    for role in ROLES:
        one = certificate(folder / f"{role}.pem")
        assert roles_of(one) == (role,)
        one.verify_directly_issued_by(certificate(folder / "ca.pem"))
    router = certificate(folder / "router.pem")
    assert dns_names(router) == ["localhost", "inference.example.org"]
    names = router.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == [
        "127.0.0.1",
        "::1",
        "10.0.0.7",
    ]
    assert "kvrelay-worker" in dns_names(certificate(folder / "worker.pem"))
    assert dns_names(certificate(folder / "client.pem")) == []


def test_nothing_is_overwritten(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "worker-key.pem").write_text("precious")
    assert run(["certs", str(tmp_path)]) == 2
    assert (
        f"{tmp_path}/worker-key.pem exists, and certificates are not overwritten"
        in capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["worker-key.pem"], "and nothing is begun"


def test_many_files_that_exist_are_counted(tmp_path: Path, capsys: Output) -> None:
    assert run(["certs", str(tmp_path)]) == 0
    assert run(["certs", str(tmp_path)]) == 2
    told = f"kvrelay: {tmp_path}/ca.pem and 9 more files exist, and certificates are not"
    assert capsys.readouterr().err.startswith(told)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "exämple"], "'exämple' is neither an IP address nor a DNS name"),
        (["--host", "bad host"], "'bad host' is neither an IP address nor a DNS name"),
        (["--host", "a..b"], "'a..b' is neither an IP address nor a DNS name"),
        (["--host", "a" * 254], "is neither an IP address nor a DNS name"),
        (["--days", "0"], "Invalid value for '--days'"),
    ],
    ids=str,
)
def test_bad_usage(tmp_path: Path, capsys: Output, arguments: list[str], says: str) -> None:
    assert run(["certs", str(tmp_path / "new"), *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "file").touch()
    assert run(["certs", str(tmp_path / "file" / "certs")]) == 2
    assert "cannot be written to: Not a directory" in capsys.readouterr().err
