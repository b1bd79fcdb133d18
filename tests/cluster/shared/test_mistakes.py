"""What people type wrongly at the beginning: one sentence that says what to do, and an exit code. A
library's own words do not appear.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from support.running_cluster import RunningCluster

import kvrelay

ROOT = Path(__file__).resolve().parents[3]
HTTP = "that port speaks HTTP/1.1, not gRPC; give the address behind"
OTHER = "that port has another service; give the address behind"
NOTHING = "nothing listens there; start a cluster with `kvrelay serve`"
# (command line, exit code, words of the line)
MISTAKES = [
    ("generate hi --target 127.0.0.1:{free}", 1, NOTHING),
    ("chat --target 127.0.0.1:{free}", 1, NOTHING),
    ("status --admin 127.0.0.1:{free}", 1, NOTHING),
    ("generate hi --target {admin}", 1, f"{OTHER} `grpc=`"),
    ("chat --target {admin}", 1, f"{OTHER} `grpc=`"),
    ("status --admin {grpc}", 1, f"{OTHER} `admin=`"),
    ("generate hi --target {http}", 1, f"{HTTP} `grpc=`"),
    ("status --admin {http}", 1, f"{HTTP} `admin=`"),
    ("loadtest run --num-requests 1 --target {admin}", 1, f"{OTHER} `grpc=`"),
    ("loadtest run --num-requests 1 --target {http}", 1, f"{HTTP} `grpc=`"),
    ("loadtest run --num-requests 1 --target http://{grpc}", 1, "give the address behind `http=`"),
    ("generate hi --target http://{http}", 2, "give HOST:PORT without http://"),
    ("generate hi --target localhost", 2, "give HOST:PORT without http://"),
    ("generate hi --target nowhere.invalid:1", 1, "no host has that name; give HOST:PORT"),
    ("generate hi --target {grpc} --tls-ca {ca}", 1, "the server speaks no TLS: leave out the CA"),
    ("generate hi --target {grpc} --tls-ca {junk}", 2, "contains no PEM certificate"),
    ("generate hi --target {grpc} --token-file {junk}x", 2, "cannot be read: No such file"),
    ("generate hi --target {grpc} --model gpt-4", 1, "this cluster serves 'demo'"),
    ("generate hi --target {grpc} --max-tokens 99999", 2, "set max_tokens to at most"),
    ("generate hi --target {grpc} --temperature -1", 2, "allowed is 0 to 100"),
    ("generate hi --temperature hot", 2, "it must be a number"),
    ("serve --prefill two", 2, "it must be a whole number"),
    ("chat --target {grpc} --model gpt-4", 2, "--model: 'gpt-4' is not served; served are demo"),
    ("generate", 2, "give PROMPT, - for stdin, or --file FILE"),
    ("generate --file {junk}x", 2, "cannot be read: No such file"),
    ("genrate hi", 2, "Did you mean 'generate'?"),
    ("serve --prefil 2", 2, "--prefill"),
    (
        "serve --grpc-port {grpc_port}",
        2,
        "if a cluster runs already, use it or stop it; otherwise set listen.grpc (--grpc-port)",
    ),
    ("serve --model {junk}", 2, "it is a file, not a folder"),
    ("serve --config {junk}x", 2, "cannot be read: No such file"),
    ("scale --admin {admin} prefil=2", 2, "give prefill=N or decode=N"),
    ("scale --admin {admin} --decode 2", 2, "write decode=N"),
    ("drain --admin {admin} nobody", 1, "the workers are {workers}"),
    ("loadtest report {junk}", 2, "not a report of `kvrelay loadtest --json`"),
    ("serve -c README.md", 2, "a colon where YAML allows none; write one key: value a line"),
    ("check --prefill -1", 2, "prefill"),
    ("check --grpc-port 99999", 2, "allowed are 0 to 65535"),
    ("verify --requests 0", 2, "it must be greater than or equal to 1"),
    ("lab nosuch", 2, "there is no such folder"),
    ("lab --html /nosuch/x.html", 2, "/nosuch"),
    ("loadtest run --rate fast", 2, "'fast' is not a number"),
    ("loadtest run --num-requests 1 --target http://127.0.0.1:{free}", 1, NOTHING),
    ("generate --target {grpc} --timeout 0.001 hi", 1, "give more time (--timeout SECONDS"),
    ("top --admin {admin}", 2, "not a terminal that can be redrawn; use kvrelay status"),
]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port on which nobody listens, and nobody can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


async def typed(command: list[str]) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"},
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(("line", "code", "words"), MISTAKES, ids=[one[0] for one in MISTAKES])
@pytest.mark.sweep(3)
async def test_a_mistake_gives_one_line_that_says_what_to_do(
    line: str,
    code: int,
    words: str,
    cluster: RunningCluster,
    silent_port: int,
    tmp_path: Path,
) -> None:
    junk = tmp_path / "junk"
    junk.write_text("junk\n")
    ca = tmp_path / "ca.pem"
    ends = cluster.local.endpoints
    # Earlier tests have killed some of them.
    pools = (await cluster.settled()).pools
    places = {
        "free": silent_port,
        "grpc": ends.grpc,
        "grpc_port": ends.grpc.rpartition(":")[2],
        "http": ends.http.removeprefix("http://"),
        "admin": ends.admin,
        "junk": junk,
        "ca": ca,
        "workers": ", ".join(sorted(one.worker_id for pool in pools for one in pool.workers)),
    }
    if "{ca}" in line:
        made = await typed([sys.executable, "-m", "kvrelay", "certs", str(tmp_path)])
        assert made[0] == 0
    found, out, err = await typed([sys.executable, "-m", "kvrelay", *line.format(**places).split()])
    assert found == code, err
    assert out == ""
    assert err.startswith("kvrelay: ")
    assert err.count("\n") == 1, err
    assert words.format(**places).lower() in err.lower()
    for noise in ("Traceback", "SETTINGS", "[field:", "{", "E0000"):
        assert noise not in err


async def test_an_example_says_how_it_is_used() -> None:
    code, _, err = await typed([sys.executable, "examples/batch.py"])
    assert (code, err) == (1, "usage: python examples/batch.py PROMPTS.jsonl ANSWERS.jsonl\n")


def test_the_sdk_names_the_bad_argument(tmp_path: Path) -> None:
    with pytest.raises(kvrelay.InvalidArgument, match=r"^tls: .*/none.pem cannot be read"):
        kvrelay.Client("127.0.0.1:1", tls=str(tmp_path / "none.pem"))
    with pytest.raises(kvrelay.InvalidArgument, match="without http://"):
        kvrelay.Client("http://127.0.0.1:1")
    with pytest.raises(kvrelay.InvalidArgument, match="targets is 50051; give HOST:PORT as text"):
        kvrelay.Client(50051)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": ["a", "b"]}, "prompt: .*: it must be text"),
        ({"prompt": "a", "max_tokens": "3"}, "max_tokens: '3': it must be a whole number"),
        ({"prompt": "a", "temperature": "hot"}, "temperature: 'hot': it must be a number"),
        ({"token_ids": "abc"}, "token_ids: it must be a whole number"),
        ({"prompt": "a", "stop": 5}, "stop: 5 is invalid: it must be a list"),
        ({"messages": "hi"}, 'each message must be {"role": "user", "content": "text"}, or'),
        ({"messages": [{"rol": "user"}]}, 'each message must be {"role": "user"'),
    ],
)
def test_the_sdk_names_the_bad_option(options: dict[str, Any], words: str) -> None:
    with kvrelay.Client("127.0.0.1:1") as client, pytest.raises(kvrelay.InvalidArgument) as caught:
        client.generate(**options).result()
    assert re.search(words, str(caught.value))


def test_an_error_of_the_sdk_is_one_traceback() -> None:
    policy = kvrelay.RetryPolicy(max_attempts=1)
    with kvrelay.Client("127.0.0.1:1", retry=policy) as client:
        for call in (client.models, client.generate("hi").result):
            with pytest.raises(kvrelay.Unavailable) as caught:
                call()
            assert caught.value.__cause__ is None
            assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/v1/completions", "did you mean /v1/completions?"),
        ("POST", "/chat/completions", "did you mean /v1/chat/completions?"),
        ("GET", "/%00%ff" + "y" * 3000, "/openapi.json lists what does"),
        ("GET", "/v1/completions", "/v1/completions does not accept GET; use POST"),
        ("POST", "/v1/embeddings", "/openapi.json lists what does"),
    ],
)
async def test_a_path_that_does_not_exist(
    method: str, path: str, words: str, cluster: RunningCluster
) -> None:
    request = Request(
        cluster.local.endpoints.http + path, b"{}" if method == "POST" else None, method=method
    )
    with pytest.raises(HTTPError) as caught:
        await asyncio.to_thread(urlopen, request, timeout=60)
    assert caught.value.code in (404, 405)
    message = json.load(caught.value)["error"]["message"]
    assert words in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"prompt": "a", "max_token": 3}, "did you mean max_tokens?"),
        ("/v1/completions", {"messages": []}, "send it to /v1/chat/completions"),
        ("/v1/chat/completions", {"prompt": "a", "messages": []}, "send it to /v1/completions"),
        ("/v1/completions", {"prompt": "a", "colour": 3}, "leave it out"),
        ("/v1/completions", {"prompt": "a", "stop": 5}, "stop is 5; it must be text or a list"),
        ("/v1/chat/completions", {"messages": []}, "a list of 0; it must have at least 1 item"),
    ],
)
async def test_a_field_that_is_not_known(
    path: str, body: dict[str, Any], words: str, cluster: RunningCluster
) -> None:
    request = Request(
        cluster.local.endpoints.http + path,
        json.dumps({"model": "demo", **body}).encode(),
        {"content-type": "application/json"},
    )
    with pytest.raises(HTTPError) as caught:
        await asyncio.to_thread(urlopen, request, timeout=60)
    assert caught.value.code == 400
    assert words in json.load(caught.value)["error"]["message"]
