"""Every program in examples/, as a user runs it, against one cluster."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]
FOLDER = Path(__file__).resolve().parents[3] / "examples"
Environment = dict[str, str]


def run(
    environment: Environment, program: str, *arguments: str, text: str = "", code: int = 0
) -> str:
    done = subprocess.run(
        [sys.executable, str(FOLDER / program), *arguments],
        env=environment,
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (code, ""), done.stdout + done.stderr
    return done.stdout


def test_stream(environment: Environment) -> None:
    shown = run(environment, "stream.py")
    assert re.search(r"(length|stop) after \d+ tokens, (disaggregated|local): ", shown)
    assert "prefill " in shown


def test_fan_out(environment: Environment) -> None:
    assert "100 answers, " in run(environment, "fan_out.py")


def test_chat(environment: Environment) -> None:
    shown = run(environment, "chat.py", text="Hello!\nAnd then?\n\n")
    assert len(re.findall(r"\[\d+ of \d+ prompt tokens were cached\]", shown)) == 2


def test_several_routers(environment: Environment) -> None:
    assert "resumed after 10 tokens: the same answer" in run(environment, "several_routers.py")


def test_errors(environment: Environment) -> None:
    shown = run(environment, "errors.py").splitlines()
    assert [line.split(":")[0] for line in shown if not line.startswith(" ")] == [
        "deadline",
        "bad argument, field top_p",
        "no such model",
        "first piece",
        "cancelled",
        "unreachable",
    ]


def test_a_stream_into_a_program_that_ends(environment: Environment) -> None:
    program = f"{sys.executable} {FOLDER / 'stream.py'}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {program} | head -c 1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (len(done.stdout), done.stderr) == (1, "")


def test_batch(environment: Environment, tmp_path: Path) -> None:
    rows = [{"prompt": f"Story {number}:", "max_tokens": 4} for number in range(20)]
    rows[7] = {"prompt": "x", "max_tokens": -1}
    rows[8] = {"prompt": "x", "no_such_option": 1}
    rows[9] = {"prompt": "Story", "max_tokens": 4, "logit_bias": {"5": 1}}
    source, target = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    shown = run(environment, "batch.py", str(source), str(target), code=1)
    assert shown == f"18 answers and 2 errors are in {target}.\n"
    answers = sorted(
        (json.loads(line) for line in target.read_text().splitlines()), key=lambda row: row["line"]
    )
    assert [row["line"] for row in answers] == list(range(1, 21))
    assert [row["line"] for row in answers if "error" in row] == [8, 9]


# Lines, and what the answer says.
MISTAKES = {
    "{": "Expecting property name",
    "[1, true]": 'a line must be an object such as {"prompt": "Once"}',
    "null": "a line must be an object",
    '{"promt": "a"}': "promt: generate has no such argument",
    '{"prompt": null}': "exactly one of prompt, messages and token_ids",
    '{"prompt": [true]}': "prompt: [true]: it must be text",
    '{"prompt": "a", "max_tokens": true}': "max_tokens: true is invalid",
    '{"prompt": "a", "max_tokens": {"a": null}}': "max_tokens: {'a': null}: it must be a whole",
    '{"prompt": "a", "temperature": [false]}': "temperature: [false]: it must be a number",
    '{"prompt": "a", "ignore_eos": "yes"}': "ignore_eos: 'yes' is invalid: it must be true or",
    '{"prompt": "a", "logit_bias": [null]}': "logit_bias: [null] is invalid: it must map token ids",
    '{"prompt": "a", "logit_bias": {"5": null}}': "token ids to numbers, not {'5': null}",
    '{"prompt": "a", "slo": [5]}': "slo: [5] is invalid: it may have ttft_ms and itl_ms",
    '{"prompt": "a", "slo": {"x": 5}}': "it may have ttft_ms and itl_ms, in milliseconds",
    '{"prompt": "a", "guidance": [1]}': "give exactly one of json_schema, regex and lark",
    '{"prompt": "a", "guidance": {"x": 1}}': "give exactly one of json_schema, regex and lark",
    '{"prompt": "a", "timeout": "x"}': "timeout",
    '{"messages": "hi"}': "messages: 'hi' is invalid: it must be a list of messages",
    '{"messages": [{"role": "user", "content": null}]}': "not {'content': null, 'role': 'user'}",
    '{"messages": {}}': "it must be a list of messages",
}
PYTHON_WORDS = re.compile(r"\b(None|True|False|NoneType|dict|tuple|str|int|bool|__init__|\*\*)\b")


def test_mistakes_in_a_batch_are_told_in_the_words_of_json(
    environment: Environment, tmp_path: Path
) -> None:
    source, target = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    source.write_text("\n".join(MISTAKES))
    run(environment, "batch.py", str(source), str(target), code=1)
    rows = {row["line"]: row for row in map(json.loads, target.read_text().splitlines())}
    for number, (line, words) in enumerate(MISTAKES.items(), 1):
        error = rows[number]["error"]
        assert words in error, line
        assert not PYTHON_WORDS.search(error), error


def test_tour(environment: Environment, tmp_path: Path) -> None:
    """All cells of the notebook, in order."""
    cells = json.loads((FOLDER / "tour.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    program = tmp_path / "cells.py"
    program.write_text(f"import os\nos.chdir({str(FOLDER)!r})\n" + "\n".join(code))
    shown = run(environment, str(program))
    assert "disaggregated: " in shown
    assert re.search(r"[1-9]\d* of \d+ prompt tokens were cached", shown)
    assert re.search(r"^\{'name': '(Tom|Lily)', 'age': -?\d+\}$", shown, re.MULTILINE)


def test_openai_client(environment: Environment) -> None:
    pytest.importorskip("openai", reason="the openai package is not installed")
    assert run(environment, "openai_client.py").endswith("\n32 tokens\n")


def test_tools(environment: Environment) -> None:
    pytest.importorskip("openai", reason="the openai package is not installed")
    shown = run(environment, "tools.py")
    assert re.search(r"  multiply\(.*17.*23.*\) returns 391\n17 times 23 is 391\.\n", shown)
    weather = "sunny, 21 degrees"
    assert f'  get_weather({{"city": "Paris"}}) returns {weather}\n' in shown
    assert f"The weather in Paris is {weather}.\n" in shown
    assert shown.endswith("> Who are you?\nI am demo, the small model that comes with kvrelay.\n")


def test_web_app(environment: Environment) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "--app-dir",
        str(FOLDER),
        "web_app:app",
        "--port",
        str(port),
    ]
    with subprocess.Popen([*command, "--log-level", "error"], env=environment) as app:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                for _ in range(200):
                    try:
                        story = http.get("/story", params={"about": "a fox"})
                        break
                    except httpx.ConnectError:
                        assert app.poll() is None
                        time.sleep(0.1)  # until it listens
            assert (story.status_code, bool(story.text)) == (200, True)
        finally:
            app.terminate()


@pytest.mark.parametrize(
    "program", sorted({one.name for one in FOLDER.glob("*.py")} - {"batch.py", "web_app.py"})
)
def test_without_a_cluster_an_example_says_so(program: str) -> None:
    """In one line. batch.py writes errors to its file, and the web application to the browser."""
    nowhere = {"KVRELAY_TARGET": "127.0.0.1:1", "KVRELAY_HTTP": "http://127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / program)],
        env=os.environ | nowhere,
        input="Hello!\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "kvrelay serve" in line


def test_no_example_is_left_out_and_none_is_long() -> None:
    programs = {one.name for one in FOLDER.glob("*.py")}
    tested = set(re.findall(r'run\(\w+, "(\w+\.py)"', Path(__file__).read_text())) | {"web_app.py"}
    assert programs == tested
    described = (FOLDER / "README.md").read_text()
    for name in programs:
        assert f"({name})" in described
        assert len((FOLDER / name).read_text().splitlines()) <= 60
