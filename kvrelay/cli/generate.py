"""`kvrelay generate`: streams one answer."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvrelay.cli.options.connection import TlsCa, TlsCert, TlsKey, TokenFile
from kvrelay.cli.terminal.answer import print_answer
from kvrelay.cli.terminal.notes import note_waits
from kvrelay.cli.views import render
from kvrelay.config.bounded_file import file_bytes, read_at_most
from kvrelay.errors import InvalidArgument
from kvrelay.types.ledger_json import ledger_to_json

if TYPE_CHECKING:
    from kvrelay.client import Completion, Stream

# Bytes of a prompt: the router takes no larger message.
MAX_PROMPT = 4 * 2**20

Target = Annotated[
    str,
    typer.Option(
        envvar="KVRELAY_TARGET",
        metavar="HOST:PORT",
        help="Router; add others after commas for failover.",
    ),
]

Model = Annotated[
    str, typer.Option(metavar="NAME", help="Model name; required if the cluster serves several.")
]
Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="T", help="Sampling temperature, 0 to 100; 0 is greedy. Default: the model's, or 1."
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        metavar="P",
        help="Probability of the most likely tokens that are sampled from, above 0 to 1. Default: "
        "the model's, or 1.",
    ),
]
Seed = Annotated[
    int | None, typer.Option(metavar="S", help="Sampling seed. Default: a random seed.")
]


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Prompt; - reads it from stdin.")
    ] = None,
    target: Target = "127.0.0.1:50051",
    model: Model = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Most tokens of the answer. Default: 64; with --chat, to the end of the context.",
        ),
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Text before which the answer ends; repeatable."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", metavar="FILE", help="UTF-8 file to read the prompt from; - is stdin."
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user message of a chat.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=1e-3, help="Timeout of the whole answer."),
    ] = 600.0,
    as_json: Annotated[
        bool,
        typer.Option("--json", envvar="KVRELAY_JSON", help="Print one JSON object at the end."),
    ] = False,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Print the latency breakdown on stderr.")
    ] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Stream the answer to a prompt.

    Example: kvrelay generate "Once upon a time" --max-tokens 64 --ledger
    """
    import kvrelay
    from kvrelay.client.connection import Connection

    text = _prompt(prompt, file)
    note_waits()
    connection = Connection(token_file, tls_ca, tls_cert, tls_key)
    options: dict[str, Any] = {"messages": [("user", text)]} if chat else {"prompt": text}
    with (
        kvrelay.Client(
            target.split(","), timeout=timeout, token=connection.token(), tls=connection.tls()
        ) as client,
        client.generate(
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=[as_utf8(one) for one in stop or ()],
            **options,
        ) as stream,
    ):
        if not as_json:
            _print(stream)
        completion = stream.result()
    if as_json:
        print(json.dumps(_as_json(completion), indent=2))
    if ledger:
        Console(stderr=True, markup=False, highlight=False).print(render.ledger_table(completion))


def _print(stream: Stream) -> None:
    """Prints the answer as it arrives. Tells a person why it ends in mid-sentence."""
    print_answer(event.text for event in stream)
    completion = stream.result()
    if completion.finish_reason == "length" and sys.stdout.isatty():
        count = completion.usage.completion_tokens
        typer.echo(f"(cut at {count} tokens; --max-tokens sets the limit)", err=True)


def _prompt(argument: str | None, file: Path | None) -> str:
    """Returns the prompt. Raises BadParameter unless exactly one source is given, and
    InvalidArgument if the source cannot be read.
    """
    if file is not None and argument is not None:
        raise typer.BadParameter("PROMPT and --file are both given; give one of them.")
    if str(file) == "-":
        file, argument = None, "-"
    if file is None and argument != "-":
        if not argument:
            found = "there is no prompt" if argument is None else "PROMPT is empty"
            raise typer.BadParameter(f"{found}; give PROMPT, - for stdin, or --file FILE.")
        return as_utf8(argument)
    if file is None and sys.stdin is None:
        raise InvalidArgument("stdin is closed; give PROMPT or --file FILE", field="prompt")
    name = "stdin" if file is None else str(file)
    try:
        if file is None:
            raw = read_at_most(sys.stdin.buffer, MAX_PROMPT)
        else:
            raw = file_bytes(file, MAX_PROMPT)
        # Editors may begin a file with a byte order mark.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"{name} is not UTF-8 at byte {error.start}; convert it to UTF-8", field="prompt"
        ) from None
    except OSError as error:
        source = name if file is None else f"--file {name}"
        raise InvalidArgument(
            f"{source} cannot be read: {error.strerror}", field="prompt"
        ) from None


def as_utf8(argument: str) -> str:
    """Returns an argument of the command line, read as UTF-8 in any locale if it is UTF-8."""
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        return argument


def _as_json(completion: Completion) -> dict[str, Any]:
    document = asdict(completion)
    if completion.ledger is not None:
        document["ledger"] = ledger_to_json(completion.ledger)
    return document
