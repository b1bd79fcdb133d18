"""The service that configs/kvrelay.service describes."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "configs" / "kvrelay.service"
GUIDE = ROOT / "docs" / "guides" / "systemd.md"


@pytest.fixture
def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text())
    return unit["Service"]


def test_the_options_of_its_command_exist(service: configparser.SectionProxy) -> None:
    program, command, option, file = service["ExecStart"].split()
    assert Path(program).name == "kvrelay"
    shown = subprocess.run(
        [sys.executable, "-m", "kvrelay.cli.main", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert option in shown.stdout
    assert f"{program.removesuffix('kvrelay')}pip install" in GUIDE.read_text()
    assert file in GUIDE.read_text()


def test_a_wrong_configuration_ends_with_the_code_that_is_not_started_again(
    service: configparser.SectionProxy, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("prefil: {}\n")
    command = service["ExecStart"].split()[1:3]
    done = subprocess.run(
        [sys.executable, "-m", "kvrelay.cli.main", *command, file], capture_output=True, check=False
    )
    assert str(done.returncode) in service["RestartPreventExitStatus"].split()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_accepts_it(tmp_path: Path) -> None:
    # systemd looks for the program, which is only there once the guide was followed.
    unit = tmp_path / UNIT.name
    unit.write_text(re.sub("(?m)^ExecStart=[^ ]+", f"ExecStart={sys.executable}", UNIT.read_text()))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    about_this_unit = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, about_this_unit) == (0, [])
