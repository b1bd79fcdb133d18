from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agreement import Comparison, agreement_table, compare
from load_tools import TOOLS, Load, ToolResult
from rich.console import Console
from tool_environment import fresh_folder, install, run, version

from kvrelay.errors import DeadlineExceeded, InvalidArgument, Unavailable
from kvrelay.loadtest.report.row import Row

LOAD = Load("http://127.0.0.1:1", "demo", "/models/demo", False, 2.0, 50, 256, 64, 7)
RESULT = ToolResult(50, 0, 256.0, 64.0, ttft=(104.0, 110.0), itl=(1.9, 2.0))


def row(ttft_s: float, late_s: float, *gaps: float) -> Row:
    return Row(
        0.0,
        late_s,
        ttft_s=ttft_s,
        itl_s=gaps,
        e2e_s=ttft_s + sum(gaps),
        prompt_tokens=256,
        output_tokens=len(gaps) + 1,
    )


# What each tool writes, without what is not read: an answered request fewer than the load has, and
# one that failed.
WRITTEN: dict[str, tuple[str, Any]] = {
    "openai": (
        "result.json",
        {
            "requests": [
                {
                    "error": "",
                    "ttft_s": 0.1,
                    "itl_s": [0.002, 0.004],
                    "prompt_tokens": 256,
                    "output_tokens": 3,
                },
                {
                    "error": "",
                    "ttft_s": 0.3,
                    "itl_s": [0.003, 0.007],
                    "prompt_tokens": 258,
                    "output_tokens": 3,
                },
                {
                    "error": "BadRequestError: no",
                    "ttft_s": None,
                    "itl_s": [],
                    "prompt_tokens": 0,
                    "output_tokens": 0,
                },
            ]
        },
    ),
    "vllm": (
        "result.json",
        {
            "completed": 2,
            "failed": 1,
            "total_input_tokens": 514,
            "total_output_tokens": 6,
            "median_ttft_ms": 200.0,
            "mean_ttft_ms": 200.0,
            "median_itl_ms": 3.5,
            "mean_itl_ms": 4.0,
        },
    ),
    "guidellm": (
        "result.json",
        {
            "benchmarks": [
                {
                    "metrics": {
                        "request_totals": {
                            "successful": 2,
                            "errored": 1,
                            "incomplete": 0,
                            "total": 3,
                        },
                        "prompt_token_count": {"successful": {"mean": 257.0, "median": 257.0}},
                        "output_token_count": {"successful": {"mean": 3.0, "median": 3.0}},
                        "time_to_first_token_ms": {"successful": {"mean": 200.0, "median": 200.0}},
                        "inter_token_latency_ms": {"successful": {"mean": 4.0, "median": 3.5}},
                    }
                }
            ]
        },
    ),
    "aiperf": (
        "profile_export_aiperf.json",
        {
            "request_count": {"unit": "requests", "avg": 2.0},
            "error_request_count": {"unit": "requests", "avg": 1.0},
            "input_sequence_length": {"unit": "tokens", "avg": 257.0, "p50": 257.0},
            "output_sequence_length": {"unit": "tokens", "avg": 3.0, "p50": 3.0},
            "time_to_first_token": {"unit": "ms", "avg": 200.0, "p50": 200.0},
            "inter_token_latency": {"unit": "ms", "avg": 4.0, "p50": 3.5},
        },
    ),
}


@pytest.mark.parametrize("name", TOOLS)
def test_every_tools_file_is_read_into_one_shape(name: str, tmp_path: Path) -> None:
    file, written = WRITTEN[name]
    (tmp_path / file).write_text(json.dumps(written))
    result = TOOLS[name].read(tmp_path)
    assert (result.requests, result.errors) == (2, 1)
    assert (result.prompt_tokens, result.output_tokens) == (257, 3)
    # kvrelay's own median of an even number is the lower of the two in the middle.
    ttft, itl = (100, 3) if name == "openai" else (200, 3.5)
    assert result.ttft == pytest.approx((ttft, 200))
    assert result.itl == pytest.approx((itl, 4))


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("chat", [False, True])
def test_every_tool_is_told_the_whole_load(name: str, chat: bool) -> None:
    load = Load("http://127.0.0.1:1", "demo", "/models/demo", chat, 2.5, 51, 257, 63, 7)
    words = " ".join(TOOLS[name].command(Path("/venv/bin"), load, Path("/out")))
    assert words.startswith("/venv/bin/")
    for part in ("http://127.0.0.1:1", "demo", "2.5", "51", "257", "63", "/out"):
        assert part in words
    assert words != " ".join(TOOLS[name].command(Path("/venv/bin"), LOAD, Path("/out")))


def test_ours_are_counted_as_the_tool_counts() -> None:
    before, after = (
        [row(0.11, 0.01, 0.001, 0.003)],
        [row(0.2, 0.0, 0.002, 0.006), row(0.3, 0.0, 0.002, 0.006)],
    )
    by_gap = {one.name: one for one in compare("vllm", "1", RESULT, "gap", before, after).figures}
    assert by_gap["TTFT median"].ours == pytest.approx(200)
    assert by_gap["TTFT mean"].ours == pytest.approx(200)
    assert by_gap["TTFT median"].before == pytest.approx(100)
    assert by_gap["ITL median"].ours == pytest.approx(2)
    assert by_gap["ITL mean"].ours == pytest.approx(20 / 6)
    by_request = {
        one.name: one for one in compare("aiperf", "1", RESULT, "request", before, after).figures
    }
    assert by_request["ITL median"].ours == pytest.approx(4)
    assert by_request["ITL median"].noise == pytest.approx(100)
    assert by_request["ITL median"].difference == pytest.approx(-52.5)


@pytest.mark.parametrize(
    ("result", "agrees"),
    [
        (RESULT, True),
        (ToolResult(49, 0, 256, 64, RESULT.ttft, RESULT.itl), False),
        (ToolResult(50, 1, 256, 64, RESULT.ttft, RESULT.itl), False),
        (ToolResult(50, 0, 256, 64, (106.0, 100.0), RESULT.itl), False),
        (ToolResult(50, 0, 256, 64, RESULT.ttft, (1.8, 2.0)), False),
    ],
)
def test_agreement_needs_every_answer_and_close_medians(result: ToolResult, agrees: bool) -> None:
    rows = [row(0.1, 0.0, 0.0019, 0.002)]
    assert compare("vllm", "1", result, "request", rows, rows).agrees(50, within=5) is agrees


def test_the_table_shows_both_sides() -> None:
    rows = [row(0.1, 0.0, 0.002, 0.002)]
    comparison: Comparison = compare("vllm", "0.32.0", RESULT, "gap", rows, rows)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(agreement_table([comparison]))
    lines = [line for line in capture.get().splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in lines]
    assert cells[0] == [
        *(
            "vllm",
            "0.32.0",
            "50",
            "0",
            "256 + 64",
            "TTFT median",
            "104.00",
            "100.00",
            "+4.0%",
            "+0.0%",
        ),
    ]
    assert [line[-5] for line in cells] == ["TTFT median", "TTFT mean", "ITL median", "ITL mean"]


async def test_a_tool_that_fails_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no such load"):
        await run(["/bin/sh", "-c", "echo no such load >&2; exit 3"], tmp_path / "log", 30)


async def test_a_tool_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match=r"0\.1 s"):
        await run(["/bin/sleep", "60"], tmp_path / "log", 0.1)


def test_an_environment_is_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "openai"
    folder.mkdir()
    (folder / "installed.txt").write_text(TOOLS["openai"].requirements[0][0])
    assert install(TOOLS["openai"], tmp_path) == folder / "venv" / "bin" / "python"
    assert not (folder / "venv").exists()


def test_an_environment_without_the_tool_is_an_error(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(Unavailable, match="guidellm is not installed"):
        version(TOOLS["guidellm"], python)


def test_a_folder_of_an_earlier_run_is_emptied_and_no_other(tmp_path: Path) -> None:
    folder = fresh_folder(tmp_path / "out" / "vllm")
    (folder / "result.json").write_text("{}")
    assert [one.name for one in fresh_folder(folder).iterdir()] == ["log"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(InvalidArgument, match="--out"):
        fresh_folder(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()
