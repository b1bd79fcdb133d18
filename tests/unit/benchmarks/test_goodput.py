from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from goodput import Load, goodput, offer, summary
from mixes import plan
from rich.console import Console
from starlette.responses import JSONResponse
from support.openai_server import HttpServer, http_serving, sse
from vllm_pair import VllmPairSender
from vllm_server import vllm_server

from kvrelay.errors import Unavailable
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.senders.http_sender import HttpSender
from kvrelay.loadtest.slo import Slo, parse_slos
from kvrelay.loadtest.workload import PlannedRequest

SLOS = parse_slos(["ttft:2000", "tpot:100"])
REQUEST = PlannedRequest(0.0, prompt=None, token_ids=(5, 6, 7), output_tokens=3, seed=1)


def row(ttft_s: float) -> Row:
    return Row(0.0, 0.0, ttft_s=ttft_s, itl_s=(0.05,), e2e_s=ttft_s + 0.05, output_tokens=2)


def report(rate: float, good: int, of: int = 10) -> Report:
    rows = tuple(row(0.5 if i < good else 5.0) for i in range(of))
    return Report({"rate": rate}, SLOS, rows)


async def test_the_pair_gets_one_request_in_two_steps() -> None:
    where = {"remote_host": "localhost", "remote_block_ids": [1, 2]}
    prefill, decode = HttpServer(), HttpServer()
    prefill.replies.append(
        JSONResponse({"choices": [{"text": " t1"}], "kv_transfer_params": where})
    )
    with http_serving(prefill) as first, http_serving(decode) as second:
        async with VllmPairSender(first, second, timeout=10, temperature=0) as sender:
            await sender.models()
            result = await sender.send(REQUEST, time.perf_counter())
    assert result.ok
    assert (result.output_tokens, result.prompt_tokens) == (3, 3)
    (asked,) = prefill.bodies
    assert (asked["max_tokens"], asked["stream"], asked["prompt"]) == (1, False, [5, 6, 7])
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert asked["temperature"] == 0
    (continued,) = decode.bodies
    assert continued["kv_transfer_params"] == where
    assert (continued["max_tokens"], continued["stream"], continued["ignore_eos"]) == (
        3,
        True,
        True,
    )


@pytest.mark.parametrize("broken", ["prefill", "decode"])
async def test_a_failure_of_either_is_a_row(broken: str) -> None:
    prefill, decode = HttpServer(), HttpServer()
    if broken == "prefill":
        prefill.replies.append(JSONResponse({"error": {"message": "full"}}, status_code=503))
    else:
        prefill.replies.append(JSONResponse({"kv_transfer_params": {}}))
        decode.replies.append(sse({"error": {"message": "gone"}}))
    with http_serving(prefill) as first, http_serving(decode) as second:
        async with VllmPairSender(first, second, timeout=10) as sender:
            await sender.models()
            result = await sender.send(REQUEST, time.perf_counter())
    assert not result.ok
    assert ("full" in result.message) == (broken == "prefill")


async def test_a_prefill_server_without_a_connector_is_an_error() -> None:
    prefill, decode = HttpServer(), HttpServer()
    prefill.replies.append(JSONResponse({"choices": [{"text": " t1"}], "kv_transfer_params": None}))
    with http_serving(prefill) as first, http_serving(decode) as second:
        async with VllmPairSender(first, second, timeout=10) as sender:
            await sender.models()
            result = await sender.send(REQUEST, time.perf_counter())
    assert "no kv_transfer_params" in result.message
    assert not decode.bodies


async def test_the_same_requests_come_at_any_rate() -> None:
    seen = []
    for rate in (1000.0, 2000.0):
        server = HttpServer()
        with http_serving(server) as target:
            async with HttpSender(target, timeout=10) as sender:
                report = await offer(
                    sender, "one", Load("mixed", SLOS, [rate], rate, 3, 7, vocab_size=50), rate, 3
                )
        assert report.options["rate"] == rate
        seen.append(sorted((tuple(body["prompt"]), body["max_tokens"]) for body in server.bodies))
    assert seen[0] == seen[1]
    assert len(seen[0]) == 3


def test_a_mix_alternates_each_minute() -> None:
    requests = list(plan("alternating", 2.0, 360, seed=7, vocab_size=50))
    phases = [int(one.at // 60) % 2 for one in requests]
    assert {*phases} == {0, 1}
    for phase, one in zip(phases, requests, strict=True):
        assert one.token_ids is not None
        assert (one.output_tokens >= 128) == (phase == 1)
        assert (len(one.token_ids) >= 400) == (phase == 0)


def test_goodput_is_the_highest_rate_that_is_good_enough() -> None:
    reports = [("a", report(1, 10)), ("a", report(2, 9)), ("a", report(3, 8)), ("b", report(1, 5))]
    assert goodput(reports) == {"a": 2, "b": None}


def test_failed_requests_are_not_good() -> None:
    failed = Row(0.0, 0.0, error="UNAVAILABLE")
    assert Report({"rate": 1}, (Slo("ttft", 100),), (row(0.05), failed)).good_share == 0.5


def test_the_table_has_a_line_for_each_system_and_rate() -> None:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(summary([("vllm", report(2, 3)), ("kvrelay", report(1, 10))]))
    lines = capture.get().splitlines()
    cells = [
        [cell.strip() for cell in line.strip("│ ").split("│")]
        for line in lines
        if line.startswith("│")
    ]
    assert [line[:4] for line in cells] == [
        ["kvrelay", "1", "100%", "0"],
        ["vllm", "2", "30%", "0"],
    ]
    assert cells[0][4] == "500"


async def test_a_server_that_ends_is_reported_with_its_log(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nraise SystemExit('no module named vllm')\n")
    python.chmod(0o755)
    log = tmp_path / "log"
    with pytest.raises(Unavailable, match=str(log)):
        async with vllm_server(python, "m", [0], log):
            raise AssertionError("it is not ready")
    assert "no module named vllm" in log.read_text()
