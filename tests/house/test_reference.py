"""The reference pages say what the code says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import write_reference
from docs_site import parts_of

from kvrelay.cli.main import app
from router.api.http.dialects.anthropic import requests as messages
from router.api.http.dialects.anthropic.request_models import CountTokensRequest, MessagesRequest
from router.api.http.dialects.openai import request_models
from router.api.http.dialects.openai.requests import IGNORED
from router.api.http.dialects.responses import requests as model_responses
from router.api.http.dialects.responses.request_models import ResponsesRequest

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("*.md", "docs/**/*.md", "k8s/**/*.md", "benchmarks/README.md")
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for one in PATTERNS for path in ROOT.glob(one))
METRIC = re.compile(
    r"\b_(?:total|histogram|labelled|gauge|counter|family)\(\s*\"(?P<name>[a-z_]+)\""
)

# Series whose names the source does not spell as a plain argument.
LOOP = {
    "event_loop_stall_seconds",
    "event_loop_worst_stall_seconds",
    "event_loop_worst_cpu_seconds",
    "event_loop_core_wait_seconds",
    "pool_replicas",
}


@pytest.mark.parametrize("name", ["cli.md", "configuration.md", "errors.md"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    page = (write_reference.PAGES / name).read_text()
    assert page == write_reference.pages()[name], "run `make reference`"


def test_every_metric_is_described() -> None:
    page = (write_reference.PAGES / "metrics.md").read_text()
    source = "".join(
        path.read_text() for path in (ROOT / "router" / "observability").glob("*metrics.py")
    )
    names = {match["name"] for match in METRIC.finditer(source)}
    assert len(names) > 35
    assert {name for name in names if f"`kvrelay_{name}`" not in page} == set()
    described = set(re.findall(r"^\| `kvrelay_([a-z_]+)`", page, re.MULTILINE))
    assert {name for name in described if f'"{name}"' not in source and name not in LOOP} == set()


def test_every_http_field_is_described() -> None:
    page = (write_reference.PAGES / "http-api.md").read_text()
    models = (
        *(request_models.CompletionRequest, request_models.ChatRequest),
        *(request_models.TokenizeRequest, request_models.DetokenizeRequest),
        *(MessagesRequest, CountTokensRequest, ResponsesRequest),
    )
    ignored = IGNORED | messages.IGNORED | model_responses.IGNORED
    names = {name for one in models for name in one.model_fields} | ignored
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_every_grpc_method_and_request_field_is_described() -> None:
    page = (write_reference.PAGES / "grpc-api.md").read_text()
    folder = ROOT / "proto" / "kvrelay" / "v1"
    sources = {path.name: path.read_text() for path in folder.glob("*.proto")}
    names = {name for text in sources.values() for name in re.findall(r"\brpc (\w+)", text)}
    for message in ("GenerateRequest", "SamplingParams", "GenerateResponse"):
        body = sources["inference.proto"].partition(f"message {message} {{")[2].partition("}")[0]
        names |= set(re.findall(r"(\w+) = \d+;", body))
    assert {name for name in names if f"`{name}`" not in page} == set()


def commands_in(document: str) -> Iterator[list[str]]:
    """The words of every `kvrelay` command in a document's fenced code."""
    for is_code, part in parts_of((ROOT / document).read_text()):
        lines = part.replace("\\\n", " ").splitlines() if is_code else ()
        for line in lines:
            match = re.match(
                r"(?:nice |taskset -c \d )?(?:\.venv/bin/)?kvrelay ([a-z].*)", line.strip()
            )
            if match:
                yield shlex.split(match[1].partition("#")[0].partition("|")[0].partition(">")[0])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_documents_exist(document: str) -> None:
    """Each command exists, and each of its options is an option of it."""
    known = dict(write_reference.commands(typer.main.get_command(app), ()))
    for words in commands_in(document):
        path = tuple(words[:2]) if tuple(words[:2]) in known else tuple(words[:1])
        assert path in known, words
        options = {name for one in known[path].params for name in (*one.opts, *one.secondary_opts)}
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= options | {"--help", "-h"}, words
