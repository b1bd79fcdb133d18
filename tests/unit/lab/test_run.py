from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrelay.cli.main import run


@pytest.mark.long
@pytest.mark.timeout(600)
def test_all_experiments_run_on_the_demo_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, file = tmp_path / "lab.html", tmp_path / "lab.json"
    assert run(["lab", "--seconds", "30", "--html", str(html), "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["figures"]
    for engine in (figures["engine"], figures["int8"]):
        assert all(len(engine[what]) >= 2 for what in ("prefill", "position", "batch"))
    for one in figures["neighbour"]:
        assert one["gaps"]
        assert one["ttft"], one["form"]
    assert "Not measured" not in capsys.readouterr().out


def test_a_model_that_does_not_exist_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["lab", str(tmp_path / "none"), "--html", str(tmp_path / "lab.html")]) in (1, 2)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("kvrelay: ")
    assert "none" in error


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["lab", "--html", str(tmp_path / "none" / "lab.html")]) in (1, 2)
    assert "none" in capsys.readouterr().err
