"""Whole load tests against real servers, over gRPC and over HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from support.openai_server import WHY, HttpServer, http_serving, sse
from support.scripted_router import ScriptedRouter, Step, last, serving, tokens

from kvrelay.cli.loadtest import app
from kvrelay.cli.loadtest.options import can_be_written
from kvrelay.cli.main import run
from kvrelay.config.model_sections import RouterConfig
from kvrelay.errors import ResourceExhausted, Unavailable
from kvrelay.loadtest.measure import Run, measure
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.runner import run_load
from kvrelay.loadtest.senders.http_sender import HttpSender
from kvrelay.loadtest.senders.target import Target
from kvrelay.loadtest.workload import PlannedRequest
from kvrelay.wire.inference import ModelInfo
from router.core.path_policy import Assignment, assign
from router.core.worker_view import WorkerView

Output = pytest.CaptureFixture[str]
LOAD = ["--rate", "inf", "--num-requests", "12", "--prompt-tokens", "5-9", "--output-tokens", "3"]


LATE = {"phases": {"queue": 1e300}, "handoff": None, "attempts": []}  # a foreign ledger
SAMPLE = str(Path(__file__).parent / "traces" / "mooncake_conversation_60.jsonl")


def loadtest(*arguments: str) -> int:
    return run(["loadtest", "run", *arguments])


def test_a_run_over_grpc(capsys: Output, tmp_path: Path) -> None:
    router, file = ScriptedRouter(), tmp_path / "run.json"
    with serving(router) as target:
        slos = ["--goodput", "ttft:60000", "tpot:60000", "e2e:60000"]
        expectation = ["--expect-path", "disaggregated"]
        assert loadtest("--target", target, *LOAD, *slos, *expectation, "--json", str(file)) == 0
    shown = capsys.readouterr().out
    assert "12 of 12 requests answered" in shown
    assert "paths: disaggregated 12" in shown
    document = json.loads(file.read_text())
    assert document["options"]["target"] == target
    assert (
        document["rates_per_second"]["goodput requests"]
        == document["rates_per_second"]["requests"]
        > 0
    )
    for row in document["requests"]:
        assert (row["output_tokens"], row["prompt_tokens"], row["error"]) == (3, 7, "")
        assert 0 < row["ttft_s"] <= row["e2e_s"]
        assert sum(row["itl_s"]) == pytest.approx(row["e2e_s"] - row["ttft_s"])
    for request in router.requests:
        assert 5 <= len(request.token_ids) <= 9
        assert all(0 <= token < 337 for token in request.token_ids)
        assert (request.sampling.max_tokens, request.sampling.ignore_eos) == (3, True)
    assert len({request.sampling.seed for request in router.requests}) == 12


def test_the_same_seed_sends_the_same(tmp_path: Path) -> None:
    router = ScriptedRouter()
    with serving(router) as target:
        for seed in ("1", "1", "2"):
            assert (
                loadtest("--target", target, "--rate", "500", *LOAD[2:], "--seed", seed, "--text")
                == 0
            )
    sent = [
        sorted(request.prompt or "" for request in router.requests[at : at + 12])
        for at in (0, 12, 24)
    ]
    assert sent[0] == sent[1] != sent[2]


def test_a_failed_request_fails_the_run(capsys: Output, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    router = ScriptedRouter(
        [ResourceExhausted("queue full", retry_after_s=1.0)], [Unavailable("draining")]
    )
    with serving(router) as target:
        assert loadtest("--target", target, *LOAD, "--json", str(file)) == 1
    out, err = capsys.readouterr()
    assert "errors: RESOURCE_EXHAUSTED 1, UNAVAILABLE 1" in out
    assert err.startswith("kvrelay: 2 of 12 requests failed; the first: ")
    assert len(router.requests) == 12  # a failure is counted, not tried again
    assert sorted(row["error"] for row in json.loads(file.read_text())["requests"])[-2:] == [
        "RESOURCE_EXHAUSTED",
        "UNAVAILABLE",
    ]


def test_an_unexpected_path_fails_the_run(capsys: Output) -> None:
    with serving(ScriptedRouter(path="local")) as target:
        assert loadtest("--target", target, *LOAD, "--expect-path", "disaggregated") == 1
    assert (
        capsys.readouterr().err
        == "kvrelay: 12 of 12 requests did not take the disaggregated path\n"
    )


def gone_local(why: str) -> list[Step]:
    return [replace(last(tokens(0, 1), "local"), why=why)]


def test_a_long_prompt_that_went_local_fails_the_run(capsys: Output) -> None:
    scripts = [gone_local("no prefill worker is ready"), gone_local(WHY)]
    load = ["--num-requests", "2", "--rate", "inf"]
    with serving(ScriptedRouter(*scripts, *scripts)) as target:
        assert loadtest("--target", target, *load) == 1
        err = capsys.readouterr().err
        assert err.startswith(
            "kvrelay: 1 of 2 requests took the local path for want of a prefill worker; "
        )
        assert err.count("\n") == 1
        assert loadtest("--target", target, *load, "--allow-local") == 0


def test_reasons_are_the_routers_own() -> None:
    decode = WorkerView("decode-0", "decode", cached_tokens=90)
    for uncached, workers, strayed in ((10, [decode], False), (100, [decode], True)):
        chosen = assign(workers, 90 + uncached, frozenset(), RouterConfig())
        assert isinstance(chosen, Assignment)
        assert chosen.path == "local"
        assert (
            Row(0.0, 0.0, path=chosen.path, why=chosen.why).should_have_been_disaggregated
            == strayed
        )


def test_a_closed_loop(capsys: Output, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    with serving(ScriptedRouter()) as target:
        assert (
            loadtest(
                "--target", target, "--concurrency", "3", "--num-requests", "9", "--json", str(file)
            )
            == 0
        )
        assert loadtest("--target", target, "--concurrency", "2", "--duration", "0.1") == 0
    document = json.loads(file.read_text())
    assert document["options"]["concurrency"] == 3
    due = sorted(row["scheduled_s"] for row in document["requests"])
    assert due[:3] == [0.0, 0.0, 0.0]
    assert due[3] > 0


def test_a_trace_is_replayed(capsys: Output, tmp_path: Path) -> None:
    file, page, router = tmp_path / "run.json", tmp_path / "run.html", ScriptedRouter()
    scales = ["--time-scale", "1/100", "--length-scale", "1/32"]
    with serving(router) as target:
        files = ["--json", str(file), "--html", str(page)]
        assert (
            loadtest("--target", target, "--trace", SAMPLE, *scales, "--num-requests", "40", *files)
            == 0
        )
    shown = capsys.readouterr().out
    assert "prefix reuse: " in shown
    assert "possible reuse with an unlimited cache, blocks of 16 tokens: " in shown
    requests = sorted(router.requests, key=lambda one: one.token_ids)
    assert len(requests) == 40
    shared = requests[0].token_ids[:16]
    assert sum(one.token_ids[:16] == shared for one in requests) == 40  # block 0 is everybody's
    reuse = json.loads(file.read_text())["reuse"]
    assert 0 < reuse["shares"]["unlimited"] < 1
    assert reuse["reported"] == 40 * 2
    assert "</html>" in page.read_text()


def test_a_broken_trace_is_one_line_and_2(capsys: Output, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"timestamp": 0}\n')
    with serving(ScriptedRouter()) as target:
        assert loadtest("--target", target, "--trace", str(file)) == 2
    err = capsys.readouterr().err
    assert "t.jsonl:1: " in err
    assert err.count("\n") == 1


def test_ctrl_c_reports_on_what_there_is(capsys: Output, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    router = ScriptedRouter([last(tokens(0, 1))], ["hang"])

    def interrupt() -> None:
        if router.hanging.wait(60):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with serving(router) as target:
        assert (
            loadtest(
                "--target", target, "--concurrency", "1", "--num-requests", "9", "--json", str(file)
            )
            == 130
        )
    thread.join()
    out = capsys.readouterr().out
    assert re.search(r"1 of 2 requests answered in \S+ s, to the end of the last answer\n", out)
    assert "\nper second of that time: requests " in out
    assert run(["loadtest", "report", str(file)]) == 0
    counts = "2 requests were sent, of which 1 were answered, 0 failed and 1 were in flight; 7 were"
    assert f"interrupted: {counts} not sent" in " ".join(capsys.readouterr().out.split())
    assert run(["loadtest", "report", str(file)]) == 0
    assert f"interrupted: {counts} not sent" in " ".join(capsys.readouterr().out.split())
    document = json.loads(file.read_text())
    assert (document["in_flight"], document["unsent"]) == (1, 7)
    assert document["interrupted"]
    assert len(document["requests"]) == 1


def test_a_file_that_cannot_be_written_is_told_before_the_test(
    capsys: Output, tmp_path: Path
) -> None:
    router = ScriptedRouter()
    with serving(router) as target:
        for option in ("--json", "--html"):
            assert loadtest("--target", target, *LOAD, option, "/proc/none/x") == 2
            assert loadtest("--target", target, *LOAD, option, "/proc/none") == 2
            assert "/proc/none cannot be written: No such file" in capsys.readouterr().err
    assert not router.requests
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("kept")
    can_be_written(new, old, None)
    assert not new.exists()
    assert old.read_text() == "kept"


def test_a_disk_that_is_full_at_the_end_costs_one_file(capsys: Output, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    with serving(ScriptedRouter()) as target:
        files = ["--json", "/dev/full", "--html", str(page)]
        assert loadtest("--target", target, *LOAD, *files) == 1
    out, err = capsys.readouterr()
    assert "12 of 12 requests answered" in out
    assert "/dev/full cannot be written: No space left on device" in err
    assert f"saved {page}" in err
    assert "</html>" in page.read_text()


def test_a_sweep(capsys: Output, tmp_path: Path) -> None:
    file, page, router = tmp_path / "sweep.json", tmp_path / "sweep.html", ScriptedRouter()
    load = ["--rates", "200,400", "--num-requests", "5", "--goodput", "ttft:60000"]
    with serving(router) as target:
        files = ["--json", str(file), "--html", str(page)]
        assert run(["loadtest", "sweep", "--target", target, *load, *files]) == 0
    live = capsys.readouterr().out
    assert "goodput: 400 requests/s is the highest tested rate" in live
    prompts = [one.token_ids for one in router.requests]
    first, second = sorted(map(len, prompts[:5])), sorted(map(len, prompts[5:]))
    assert first == second  # the same lengths at each rate
    assert len({one[:4] for one in prompts}) == 10  # and no prefix in common
    document = json.loads(file.read_text())
    assert (document["best_rate"], [one["rate"] for one in document["runs"]]) == (400, [200, 400])
    assert run(["loadtest", "report", str(file)]) == 0
    assert capsys.readouterr().out == live
    assert run(["loadtest", "compare", str(file), str(file)]) == 2
    assert "a sweep" in capsys.readouterr().err


def test_a_sweep_searches(capsys: Output) -> None:
    with serving(ScriptedRouter()) as target:
        load = ["--rates", "100..200", "--num-requests", "2", "--goodput", "ttft:0.001"]
        assert run(["loadtest", "sweep", "--target", target, *load]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "there is no tested rate at which at least 90% of the requests met every objec" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--goodput"),
        (["--goodput", "ttft:1", "--rates", "0,1"], "--rates"),
        (["--goodput", "ttft:1", "--rates", "4..2"], "--rates"),
        (["--goodput", "ttft:1", "--rates", "1..inf"], "--rates"),
        (["--goodput", "ttft:1", "--attainment", "1.5"], "--attainment"),
        (["--goodput", "ttft:1", "--precision", "0"], "--precision"),
    ],
)
def test_bad_sweeps_are_one_line_and_2(capsys: Output, arguments: list[str], words: str) -> None:
    assert run(["loadtest", "sweep", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def float_options() -> Iterator[tuple[str, str]]:
    """The commands with their options that are floats, except the one that may be inf."""
    for command in (app.run, app.sweep):
        for name, kind in get_type_hints(command).items():
            if kind in (float, float | None) and name != "burstiness":
                yield command.__name__, f"--{name.replace('_', '-')}"


FLOATS = list(float_options())


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize(("command", "option"), FLOATS)
def test_an_option_that_is_not_finite_is_refused_before_the_test(
    command: str, option: str, value: str, capsys: Output
) -> None:
    others = ["--trace", SAMPLE] if command == "run" else ["--goodput", "ttft:1"]
    assert run(["loadtest", command, *others, option, value]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert option in line


def test_the_options_that_are_floats_are_found() -> None:
    assert {("run", "--timeout"), ("run", "--trace-start"), ("sweep", "--timeout")} <= {*FLOATS}


def test_report_and_compare_print_saved_runs(capsys: Output, tmp_path: Path) -> None:
    before, after = str(tmp_path / "before.json"), str(tmp_path / "after.json")
    with serving(ScriptedRouter()) as target:
        assert loadtest("--target", target, *LOAD, "--json", before) == 0
        live = capsys.readouterr().out
        assert loadtest("--target", target, *LOAD, "--json", after) == 0
    capsys.readouterr()
    assert run(["loadtest", "report", before]) == 0
    assert capsys.readouterr().out == live
    assert run(["loadtest", "compare", before, after]) == 0
    shown = capsys.readouterr().out
    for command in (["report", before], ["compare", before, after]):
        page = tmp_path / "page.html"
        assert run(["loadtest", *command, "--html", str(page)]) == 0
        assert "</html>" in page.read_text()
        page.unlink()
    for words in ("before", "after", "change", "TTFT p99, ms", "requests per s", "errors"):
        assert words in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "0"], "--rate"),
        (["--rate", "1,2"], "--rate"),
        (["--concurrency", "0"], "--concurrency"),
        (["--concurrency", "2", "--rate", "1"], "cannot be combined with"),
        (["--concurrency", "2", "--burstiness", "1"], "cannot be combined with"),
        (["--trace-format", "azure"], "requires --trace"),
        (["--trace-start", "5"], "requires --trace"),
        (["--time-scale", "2"], "require --trace"),
        (["--trace", "absent.jsonl"], "absent.jsonl: No such file"),
        (["--trace", SAMPLE, "--rate", "1"], "cannot be combined with"),
        (["--trace", SAMPLE, "--text"], "cannot be combined with"),
        (["--trace", SAMPLE, "--prompt-tokens", "9"], "cannot be combined with"),
        (["--trace", SAMPLE, "--trace-format", "csv"], "--trace-format"),
        (["--trace", SAMPLE, "--time-scale", "1/0"], "--time-scale"),
        (["--trace", SAMPLE, "--length-scale", "-1"], "--length-scale"),
        (["--trace", SAMPLE, "--trace-start", "-1"], "--trace-start"),
        (["--trace", SAMPLE, "--trace-format", "servegen"], "--num-requests"),
        (["--duration", "-1"], "--duration"),
        (["--duration", "inf"], "--duration inf"),
        (["--trace", SAMPLE, "--duration", "inf"], "--duration inf"),
        (["--admin", "nowhere"], "nowhere"),
        (["--json", "absent/run.json"], "its folder does not exist"),
        (["--html", "."], "a folder"),
        (["--rate", "nan"], "--rate"),
        (["--rate", "inf"], "--num-requests"),
        (["--burstiness", "-1"], "--burstiness"),
        (["--num-requests", "0"], "--num-requests"),
        (["--prompt-tokens", "9-3"], "prompt_tokens"),
        (["--goodput", "speed:9"], "goodput"),
        (["--expect-path", "scenic"], "--expect-path"),
        (["--target", "http://nowhere"], "http://HOST:PORT"),
        (["--target", "ftp://127.0.0.1:1"], "http://HOST:PORT"),
        (["--target", "http://127.0.0.1:one"], "http://HOST:PORT"),
    ],
)
def test_bad_usage_is_one_line_and_2(capsys: Output, arguments: list[str], words: str) -> None:
    assert loadtest(*arguments) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_nobody_there_is_one_line_and_1(capsys: Output, scheme: str) -> None:
    with serving(ScriptedRouter()) as gone:
        pass
    assert loadtest("--target", scheme + gone) == 1
    assert capsys.readouterr().err.startswith(f"kvrelay: {gone}: ")


async def test_a_slow_server_delays_no_arrival() -> None:
    """Ten requests due at once are all under way before the first is answered."""
    under_way = asyncio.Semaphore(0)

    class Together:
        count = 0

        async def send(self, request: PlannedRequest, start: float) -> Row:
            self.count += 1
            if self.count == 10:
                for _ in range(10):
                    under_way.release()
            await under_way.acquire()
            return Row(request.at, 0.0, prompt_tokens=request.seed)

    seen: list[Row] = []
    plan = [PlannedRequest(0.0, "p", None, 1, seed) for seed in range(10)]
    rows = await run_load(plan, Together(), seen.append)
    assert [row.prompt_tokens for row in rows] == list(range(10))
    assert len(seen) == 10


# HTTP


def test_a_run_over_http(capsys: Output, tmp_path: Path) -> None:
    server, file = HttpServer(), tmp_path / "run.json"
    with http_serving(server) as target:
        assert (
            loadtest("--target", target, *LOAD, "--expect-path", "local", "--json", str(file)) == 0
        )
    assert "12 of 12 requests answered" in capsys.readouterr().out
    for row in json.loads(file.read_text())["requests"]:
        assert (row["output_tokens"], row["cached_tokens"], row["finish_reason"]) == (
            3,
            1,
            "length",
        )
        assert (row["path"], row["why"]) == ("local", WHY)
        assert 5 <= row["prompt_tokens"] <= 9
        assert 0 < row["ttft_s"] <= row["e2e_s"]
    for body in server.bodies:
        assert body["stream"] is True
        assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("demo", 3, True)
        assert all(0 <= token < 50 for token in body["prompt"])


def test_a_server_that_returns_no_ids_is_counted_by_pieces(tmp_path: Path) -> None:
    server, file = HttpServer(), tmp_path / "run.json"
    server.replies = [sse({"choices": [{"text": " a"}]}, {"choices": [{"text": " b"}]}, "[DONE]")]
    with http_serving(server) as target:
        assert (
            loadtest(
                "--target", target, "--num-requests", "1", "--allow-local", "--json", str(file)
            )
            == 0
        )
    (row,) = json.loads(file.read_text())["requests"]
    assert (row["output_tokens"], len(row["itl_s"])) == (2, 1)


@pytest.mark.parametrize(
    ("reply", "code", "message"),
    [
        (
            JSONResponse({"error": {"message": "full", "type": "rate_limit_error"}}, 429),
            "RESOURCE_EXHAUSTED",
            "full",
        ),
        (JSONResponse({"detail": "?"}, 404), "NOT_FOUND", "HTTP 404"),
        (Response("oops", 500), "INTERNAL", "not a JSON object, as OpenAI's API has it: 'oops'"),
        (
            sse({"choices": []}, {"error": {"message": "lost", "type": "data_loss_error"}}),
            "DATA_LOSS",
            "lost",
        ),
        (sse({"choices": []}), "UNAVAILABLE", "before [DONE]"),
        (sse("{"), "INTERNAL", "not a JSON object"),
        (sse("[" * 200_000), "INTERNAL", "not a JSON object"),
        (
            sse({"choices": [], "usage": {"prompt_tokens": math.nan}}),
            "INTERNAL",
            "not a JSON object",
        ),
        (sse({"choices": 7}), "INTERNAL", "an event of the answer is invalid"),
        (sse({"choices": [None]}), "INTERNAL", "is invalid"),
        (sse({"usage": 5}), "INTERNAL", "usage is 5, not an object"),
        (
            sse({"usage": {"prompt_tokens": "many"}}, "[DONE]"),
            "INTERNAL",
            "prompt_tokens is 'many', not a number",
        ),
        (sse({"kvrelay": {"ledger": {"phases": 3}}}, "[DONE]"), "INTERNAL", "is invalid"),
        (
            sse({"kvrelay": {"ledger": LATE}}, "[DONE]"),
            "INTERNAL",
            "the account of the answer is invalid",
        ),
    ],
)
def test_an_http_failure_is_typed(capsys: Output, reply: Response, code: str, message: str) -> None:
    server = HttpServer()
    server.replies = [reply]
    with http_serving(server) as target:
        assert loadtest("--target", target, "--num-requests", "1") == 1
    out, err = capsys.readouterr()
    assert f"errors: {code} 1" in out
    assert message in err


@pytest.mark.parametrize("size", [2**24 + 1, 5 * 10**9, 10**20])
def test_a_vocabulary_that_fills_the_memory_is_refused(capsys: Output, size: int) -> None:
    with http_serving(HttpServer(vocab_size=None)) as target:
        code = loadtest("--target", target, "--num-requests", "1", "--vocab-size", str(size))
    assert code == 2
    assert "16777216 token ids" in capsys.readouterr().err


def test_a_vocabulary_that_is_not_told_must_be_given(capsys: Output) -> None:
    with http_serving(HttpServer(vocab_size=None)) as target:
        assert loadtest("--target", target, "--num-requests", "1") == 2
        assert "--vocab-size" in capsys.readouterr().err
        assert loadtest("--target", target, "--num-requests", "1", "--vocab-size", "9") == 0
        assert loadtest("--target", target, "--num-requests", "1", "--text") == 0


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_prompts_beyond_the_context_are_not_sent(command: str, capsys: Output) -> None:
    server = HttpServer()
    slo = ["--goodput", "e2e:1000"] if command == "sweep" else []
    load = ["--target", "", "--prompt-tokens", "100000", "--num-requests", "1", *slo]
    with http_serving(server) as load[1]:
        assert run(["loadtest", command, *load]) == 2
    assert not server.bodies
    assert "--prompt-tokens 100000" in capsys.readouterr().err


def test_a_server_without_a_model_is_named(capsys: Output) -> None:
    server = HttpServer()
    server.model = {}
    with http_serving(server) as target:
        assert loadtest("--target", target, "--num-requests", "1") == 1
    assert "serves no model" in capsys.readouterr().err


def test_what_is_no_http_server_is_named(capsys: Output) -> None:
    with serving(ScriptedRouter()) as target:
        assert loadtest("--target", f"http://{target}", "--timeout", "5") == 1
    assert re.search(f"{target}: .*; give the address behind `http=`", capsys.readouterr().err)


@pytest.mark.parametrize("status", [200, 404])
def test_a_web_server_without_the_api_is_named(status: int, capsys: Output) -> None:
    class Pages(HttpServer):
        async def models(self, request: Request) -> Response:
            return Response("<html>", status)

    with http_serving(Pages()) as target:
        assert loadtest("--target", target, "--num-requests", "1") == 1
    told = f"that server has no /v1/models (HTTP {status}); give the address behind `http=` in"
    assert told in capsys.readouterr().err


def test_what_a_server_says_it_sent_is_believed_and_nulls_are_nothing(tmp_path: Path) -> None:
    server, file = HttpServer(), tmp_path / "run.json"
    usage = {"prompt_tokens": 5, "prompt_tokens_details": None, "completion_tokens": 3}
    server.replies = [
        sse(
            {"choices": [{"text": " a b"}], "error": None, "usage": None},
            {"choices": None, "error": None},
            {"choices": [{"text": " c", "finish_reason": None}], "usage": usage, "kvrelay": None},
            "[DONE]",
        )
    ]
    with http_serving(server) as target:
        assert (
            loadtest(
                "--target", target, "--num-requests", "1", "--allow-local", "--json", str(file)
            )
            == 0
        )
    (row,) = json.loads(file.read_text())["requests"]
    assert (row["output_tokens"], len(row["itl_s"]), row["prompt_tokens"]) == (3, 1, 5)


@pytest.mark.parametrize(
    ("data", "message"), [(None, "serves no model"), ([7], "/v1/models is invalid")]
)
def test_an_odd_list_of_models_is_one_line_and_1(
    capsys: Output, data: object, message: str
) -> None:
    class Odd(HttpServer):
        async def models(self, request: Request) -> Response:
            return JSONResponse({"data": data})

    with http_serving(Odd()) as target:
        assert loadtest("--target", target, "--num-requests", "1") == 1
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_even_arrivals_are_written_as_json_and_drawn(tmp_path: Path) -> None:
    file, page = tmp_path / "run.json", tmp_path / "run.html"
    with serving(ScriptedRouter()) as target:
        load = ["--rate", "500", "--burstiness", "inf", "--num-requests", "3", "--html", str(page)]
        assert loadtest("--target", target, *load, "--json", str(file)) == 0
    assert json.loads(file.read_text(), parse_constant=refuse)["options"]["burstiness"] == "inf"
    found = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    assert json.loads(found[1], parse_constant=refuse)["runs"][0]["options"]["burstiness"] == "inf"


def test_a_sweep_whose_target_dies_says_so_and_keeps_what_it_has(
    capsys: Output, tmp_path: Path
) -> None:
    file = tmp_path / "sweep.json"
    answered, refused = [last(tokens(0, 1))], [Unavailable("gone")]
    load = ["--rates", "100,200,400", "--num-requests", "3", "--goodput", "ttft:60000"]
    with serving(ScriptedRouter(*[answered] * 3, *[refused] * 9)) as target:
        assert run(["loadtest", "sweep", "--target", target, *load, "--json", str(file)]) == 1
    out, err = capsys.readouterr()
    assert err.startswith(
        "kvrelay: the sweep ended at 200 requests/s, where none of 3 requests was answered; "
    )
    assert "goodput: 100 requests/s is the highest tested rate" in out
    assert "warning at 100/s: the run sent requests for" in out.replace("\n", " ")
    document = json.loads(file.read_text())
    assert (document["best_rate"], [one["rate"] for one in document["runs"]]) == (100, [100, 200])


def test_a_sweep_sends_for_a_minute_at_each_rate(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    with serving(ScriptedRouter()) as target:
        # One request in that time, with this seed
        load = ["--rates", "0.0001", "--seed", "0", "--goodput", "ttft:60000", "--json", str(file)]
        assert run(["loadtest", "sweep", "--target", target, *load]) == 0
    (one,) = json.loads(file.read_text())["runs"]
    assert (one["options"]["duration"], one["options"]["num_requests"], len(one["requests"])) == (
        60,
        None,
        1,
    )


async def test_metrics_that_are_gone_lose_no_test() -> None:
    class Quick:
        async def send(self, request: PlannedRequest, start: float) -> Row:
            return Row(request.at, 0.0, ttft_s=0.1, e2e_s=0.1)

    with serving(ScriptedRouter()) as gone:
        pass
    target = Target(
        Quick(), ModelInfo("demo", 0, "", "", 0), metrics=HttpSender(f"http://{gone}", 5.0)
    )
    plan = [PlannedRequest(0.0, None, (1, 2, 3), 1, 0)]
    report = await measure(target, Run(plan, {}, ()), lambda _: None, asyncio.Event())
    assert len(report.answered) == 1
    assert report.reuse is not None
    assert report.reuse.counters is None
