from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.scripted_router import ScriptedRouter, last, serving, tokens

import kvrelay
from kvrelay.cli.main import run
from kvrelay.cli.terminal import answer
from kvrelay.errors import InvalidArgument
from kvrelay.types.chat import ChatMessage

Output = pytest.CaptureFixture[str]
COMMAND = [sys.executable, "-c", "from kvrelay.cli.main import main; main()"]


def test_text_streams_to_stdout(capsys: Output) -> None:
    router = ScriptedRouter()
    with serving(router) as target:
        options = [
            "--max-tokens",
            "3",
            "--temperature",
            "0",
            "--top-p",
            "0.5",
            "--seed",
            "5",
            "--stop",
            "a b",
            "--stop",
            "c",
        ]
        assert run(["generate", "Once", "--target", target, *options]) == 0
    assert capsys.readouterr() == (" t100 t101 t102\n", "")
    (request,) = router.requests
    assert (request.prompt, request.model) == ("Once", "")
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed, sampling.stop) == (
        3,
        0.0,
        5,
        ("a b", "c"),
    )
    assert sampling.top_p == 0.5


def test_a_long_wait_is_told_on_stderr(capsys: Output) -> None:
    busy = kvrelay.ResourceExhausted("acme has used its limit", retry_after_s=1.0)
    with serving(ScriptedRouter([busy])) as target:
        for _ in range(2):
            assert run(["generate", "Once", "--max-tokens", "3", "--target", target]) == 0
    out, err = capsys.readouterr()
    assert out == " t100 t101 t102\n" * 2
    assert err == f"kvrelay: {target}: acme has used its limit; asking again in 1 s\n"


def test_a_person_does_not_see_the_spaces_before_an_answer(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with serving(ScriptedRouter()) as target:
        assert run(["generate", "Once", "--max-tokens", "3", "--target", target]) == 0
    assert capsys.readouterr() == (
        "t100 t101 t102\n",
        "(cut at 3 tokens; --max-tokens sets the limit)\n",
    )


def test_an_error_begins_a_line_of_its_own(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lost = InvalidArgument("the cluster is lost")
    with serving(ScriptedRouter([tokens(0, 100), lost])) as target:
        assert run(["generate", "Once", "--target", target]) == 2
    assert capsys.readouterr() == ("t100\n", f"kvrelay: {target}: the cluster is lost\n")


def test_a_person_is_told_of_a_long_pause(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "_SILENT_S", 0.2)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    with serving(ScriptedRouter([tokens(0, 100), 1.5, last(tokens(1, 101))])) as target:
        assert run(["generate", "Once", "--target", target]) == 0
    out, err = capsys.readouterr()
    assert out == "t100\n t101\n", "the note has a line of its own"
    assert "kvrelay: no token for 0.2 s" in err


def test_a_file_gets_the_answer_without_notes_of_pauses(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "_SILENT_S", 0.05)
    with serving(ScriptedRouter([tokens(0, 100), 1.0, last(tokens(1, 101))])) as target:
        assert run(["generate", "Once", "--target", target]) == 0
    assert capsys.readouterr() == (" t100 t101\n", "")


def test_what_is_not_given_is_left_to_the_cluster() -> None:
    router = ScriptedRouter()
    with serving(router) as target:
        assert run(["generate", "Once", "--target", target]) == 0
    sampling = router.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.stop) == (None, None, ())


def test_chat_sends_a_users_message() -> None:
    router = ScriptedRouter()
    with serving(router) as target:
        assert run(["generate", "Hello", "--chat", "--model", "demo", "--target", target]) == 0
    assert router.requests[0].prompt is None
    assert router.requests[0].messages == (ChatMessage("user", "Hello"),)
    assert router.requests[0].model == "demo"


@pytest.mark.parametrize("how", ["-", "--file -", "--file"])
def test_a_prompt_from_stdin_or_a_file(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Once upon\n  a time, ünïcode\n"
    file = tmp_path / "prompt.txt"
    file.write_text(text, encoding="utf-8")
    router = ScriptedRouter()
    with serving(router) as target, file.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        arguments = ["--file", str(file)] if how == "--file" else how.split()
        assert run(["generate", *arguments, "--target", target]) == 0
    assert router.requests[0].prompt == text


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_arguments_are_utf_8_in_any_locale(locale: str) -> None:
    router = ScriptedRouter()
    environment = os.environ | {
        "LC_ALL": locale,
        "LANG": locale,
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    with serving(router) as target:
        words = ["generate", "Grüße".encode(), "--stop", "ß".encode(), "--target", target]
        done = subprocess.run([*COMMAND, *words], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    (request,) = router.requests
    assert (request.prompt, request.sampling.stop) == ("Grüße", ("ß",))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "there is no prompt; give PROMPT, - for stdin, or --file FILE"),
        ([""], "PROMPT is empty; give PROMPT, - for stdin, or --file FILE"),
        (["text", "--file", "PATH"], "give one of them"),
        (["--file", "PATH/none"], "cannot be read: No such file or directory"),
        (["--file", "BAD"], "is not UTF-8 at byte 3"),
    ],
)
def test_a_prompt_that_cannot_be_had(
    arguments: list[str], words: str, tmp_path: Path, capsys: Output
) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"abc\xff")
    named = [one.replace("PATH", str(tmp_path)).replace("BAD", str(bad)) for one in arguments]
    assert run(["generate", *named]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_json_is_one_object(capsys: Output) -> None:
    with serving(ScriptedRouter()) as target:
        assert run(["generate", "Once", "--max-tokens", "2", "--json", "--target", target]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == " t100 t101"
    assert answer["token_ids"] == [100, 101]
    assert answer["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": 7,
        "cached_tokens": 2,
        "completion_tokens": 2,
        "reasoning_tokens": 0,
    }
    assert (answer["path"], answer["why"]) == ("disaggregated", "policy")
    assert answer["ttft_seconds"] > 0
    phases = answer["ledger"]["phases"]
    assert phases == {"queue": 0.002, "prefill": 0.008}
    assert sum(phases.values()) == pytest.approx(answer["ledger"]["ttft_seconds"])
    assert answer["ledger"]["handoff"]["bytes"] == 3072


def test_the_ledger_goes_to_stderr(capsys: Output) -> None:
    with serving(ScriptedRouter()) as target:
        assert run(["generate", "Once", "--max-tokens", "1", "--ledger", "--target", target]) == 0
    out, err = capsys.readouterr()
    assert out == " t100\n"
    for words in (
        "disaggregated: policy",
        "queue",
        "2.0 ms",
        "prefill",
        "8.0 ms",
        "3 blocks x 1 KiB = 3 KiB",
    ):
        assert words in err


def test_an_answer_without_a_ledger_says_so(capsys: Output) -> None:
    bare = tokens(0, 1)
    done = last(tokens(1))
    router = ScriptedRouter([bare, type(done)("r", 1, finish_reason="stop")])
    with serving(router) as target:
        assert run(["generate", "Once", "--json", "--ledger", "--target", target]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["ledger"] is None
    assert "no ledger" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (kvrelay.InvalidArgument("max_tokens must be above 0", field="max_tokens"), 2),
        (kvrelay.NotFound("no model x; there is\ndemo"), 1),
        (kvrelay.ResourceExhausted("the queue is full"), 1),
        (kvrelay.Internal("a defect"), 1),
    ],
)
def test_an_error_is_one_line(capsys: Output, error: kvrelay.KvRelayError, code: int) -> None:
    with serving(ScriptedRouter([error])) as target:
        assert run(["generate", "p", "--target", target]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"kvrelay: {target}: {' '.join(error.message.split())}\n"


def test_another_target_is_turned_to(capsys: Output) -> None:
    with serving(ScriptedRouter()) as gone:
        pass
    with serving(ScriptedRouter()) as target:
        assert run(["generate", "p", "--max-tokens", "1", "--target", f"{gone},{target}"]) == 0
    assert capsys.readouterr().out == " t100\n"


def test_the_environment_mirrors_options(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(ScriptedRouter()) as target:
        monkeypatch.setenv("KVRELAY_TARGET", target)
        monkeypatch.setenv("KVRELAY_GENERATE_MAX_TOKENS", "2")
        monkeypatch.setenv("KVRELAY_VERSION", "v7")  # a name that deployments use for themselves
        assert run(["generate", "p"]) == 0
    assert capsys.readouterr().out == " t100 t101\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate"], "give PROMPT, - for stdin, or --file FILE"),
        (["generate", "p", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "p", "--bogus"], "--bogus"),
        (["generate", "p", "--target", "nowhere"], "HOST:PORT"),
        (["generate", "p", "--max-tokens", str(2**40)], "max_tokens"),
        (["bogus"], "bogus"),
    ],
)
def test_bad_usage_is_one_line_and_2(capsys: Output, arguments: list[str], words: str) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvrelay: ")
    assert err.count("\n") == 1
    assert words in err


def test_a_prompt_without_quotes_is_told_what_it_lacks(capsys: Output) -> None:
    assert run(["generate", "once", "upon", "a", "time"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "(upon a time); put text with spaces in quotes; see kvrelay generate --help" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "p", "--timeout", "0"], "--timeout"),
        (["generate", "p", "--timeout", "-5"], "--timeout"),
        (["generate", "p", "--seed", "9" * 30], "it is out of range; give a smaller number"),
        (["chat", "hello"], "type the text once it has started"),
    ],
)
def test_values_and_words_that_nothing_can_take(
    arguments: list[str], words: str, capsys: Output
) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in " ".join(err.split())
    assert "Error" not in err


def test_ctrl_c_cancels_the_request_and_exits_130() -> None:
    router = ScriptedRouter([tokens(0, 1), "hang"])
    with serving(router) as target:
        process = subprocess.Popen(
            [*COMMAND, "generate", "p", "--target", target],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert router.hanging.wait(60)
        assert process.stdout is not None
        assert process.stdout.read(3) == b" t1"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        assert router.cancelled.wait(60)
    assert process.returncode == 130
    assert err == b""


def test_a_reader_that_leaves_brings_no_traceback() -> None:
    router = ScriptedRouter([tokens(0, 1), "hang"])
    with serving(router) as target:
        process = subprocess.Popen(
            [*COMMAND, "generate", "p", "--json", "--target", target],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert router.hanging.wait(60)
        assert process.stdout is not None
        process.stdout.close()
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.read() == b""
        process.stderr.close()
        assert process.wait(30) == 130


def test_a_closed_pipe_brings_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    with serving(ScriptedRouter()) as target:
        process = subprocess.run(
            [*COMMAND, "generate", "p", "--target", target],
            stdout=write,
            stderr=subprocess.PIPE,
            timeout=120,
            check=False,
        )
    os.close(write)
    assert process.returncode == 1
    assert process.stderr == b""
