"""`kvrelay chat`: a conversation in the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvrelay.cli.generate import MAX_PROMPT, Model, Seed, Target, Temperature, TopP, as_utf8
from kvrelay.cli.options.connection import TlsCa, TlsCert, TlsKey, TokenFile
from kvrelay.cli.terminal.answer import print_answer
from kvrelay.cli.terminal.notes import note, note_waits, wrapped
from kvrelay.cli.views import render
from kvrelay.config.bounded_file import bounded_lines, file_bytes
from kvrelay.errors import InvalidArgument, KvRelayError

if TYPE_CHECKING:
    from kvrelay.client import Client, Completion, Stream
    from kvrelay.client.request import GenerateOptions
    from kvrelay.wire.inference import ModelInfo

_PROMPT = "> "
_HELP = """\
/system TEXT  instruct the model; without TEXT, show the instruction
/model NAME   go on with another model; without NAME, show the models
/ledger       show the latency breakdown after each answer, or stop showing it
/file FILE    send the content of a file
/reset        begin a new conversation
/quit         end, as /exit and Ctrl-D do
Ctrl-C ends an answer early. Lines are kept in a history: arrow keys bring them back."""


def chat(
    target: Target = "127.0.0.1:50051",
    model: Model = "",
    system: Annotated[
        str, typer.Option(metavar="TEXT", help="Instruction before the conversation.")
    ] = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Most tokens of each answer. Default: to the end of the context."
        ),
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Print the latency breakdown of each answer.")
    ] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Talk to the model: each line is a message, and the model remembers the conversation.

    /help lists what else a line can be. Ctrl-D ends. The model needs a chat template. With messages
    from a pipe or file, exits with 1 if one of them got no answer.

    Example: kvrelay chat --system "Answer in one sentence."
    """
    import kvrelay
    from kvrelay.client.connection import Connection

    note_waits()
    connection = Connection(token_file, tls_ca, tls_cert, tls_key)
    with kvrelay.Client(
        target.split(","), token=connection.token(), tls=connection.tls()
    ) as client:
        models = client.models()
        served = ", ".join(one.id for one in models)
        if model:
            _check_model(model, models, "--model")
        elif sum(not one.parent for one in models) > 1:
            raise InvalidArgument(
                f"{target} serves several models; name one with --model: {served}", field="model"
            )
        options: GenerateOptions = {
            "model": model,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
        }
        conversation = Conversation(client, as_utf8(system), ledger, options)
        if _is_terminal():
            print(f"{model or served} at {target}. /help lists commands, Ctrl-D ends.")
        for line in _lines():
            if not conversation.take(line):
                break
        # A person saw the errors.
        if conversation.failures and not _is_terminal():
            raise typer.Exit(1)


class Conversation:
    """The messages so far, and what the lines of the user do to them."""

    def __init__(
        self,
        client: Client,
        system: str,
        shows_ledger: bool,
        options: GenerateOptions,
    ) -> None:
        self._client = client
        self._system = system
        self._options = options
        self._shows_ledger = shows_ledger
        self._turns: list[tuple[str, str]] = []
        # Messages without a whole answer.
        self.failures = 0
        self._notes = Console(stderr=True, markup=False, highlight=False)

    def take(self, line: str) -> bool:
        """Does what a line says: a command, or a message. Returns False at the end."""
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        match word:
            case "":
                pass
            case "/quit" | "/exit":
                return False
            case "/help":
                self._note(_HELP)
            case "/reset":
                self._turns.clear()
                self._note("A new conversation.")
            case "/system":
                self._system = rest or self._system
                self._note(f"Instruction: {self._system or 'none'}")
            case "/model":
                self._choose_model(rest)
            case "/ledger":
                self._shows_ledger = not self._shows_ledger
                self._note(f"The ledger is {'shown' if self._shows_ledger else 'not shown'}.")
            case "/file":
                self._send_file(rest)
            case _ if word.startswith("/"):
                self._note(f"{word} is no command; /help lists them.")
            case _:
                self._ask(line.strip())
        return True

    def _choose_model(self, name: str) -> None:
        try:
            models = self._client.models()
            if name:
                _check_model(name, models, "/model")
                self._options["model"] = name
        except KvRelayError as error:
            self._note(error.message)
            return
        served = ", ".join(one.id for one in models)
        self._note(f"Model: {self._options['model'] or models[0].id}; served are {served}.")

    def _send_file(self, name: str) -> None:
        if not name:
            self._note("/file needs the path of a text file.")
            return
        try:
            self._ask(file_bytes(Path(name).expanduser(), MAX_PROMPT).decode("utf-8-sig"))
        except UnicodeDecodeError:
            self._note(f"{name} is not UTF-8.")
        except OSError as error:
            self._note(f"/file {name}: {error.strerror}.")

    def _ask(self, message: str) -> None:
        """Streams the answer. A message without an answer is not kept."""
        turns = [*self._turns, ("user", message)]
        instruction = [("system", self._system)] if self._system else []
        options: GenerateOptions = {**self._options, "messages": [*instruction, *turns]}
        answered: list[str] = []
        try:
            with self._client.generate(**options) as stream:
                try:
                    print_answer(_kept(stream, answered))
                except KeyboardInterrupt:
                    self._note("(ended)")
                else:
                    self._show_end(stream.result())
        except KvRelayError as error:
            self.failures += 1
            self._note(error.message)
        if answered:
            self._turns = [*turns, ("assistant", "".join(answered))]

    def _show_end(self, completion: Completion) -> None:
        if completion.finish_reason == "length":
            self._note(f"(cut at {completion.usage.completion_tokens} tokens)")
        if self._shows_ledger:
            self._notes.print(render.ledger_table(completion))

    def _note(self, text: str) -> None:
        # Words stay whole: a name of a file can be copied.
        for line in text.splitlines():
            self._notes.print(wrapped(line, sys.stderr), style="dim", soft_wrap=True)


def _kept(stream: Stream, pieces: list[str]) -> Iterator[str]:
    """Yields the text of an answer as it arrives, and appends it to `pieces`."""
    for event in stream:
        pieces.append(event.text)
        yield event.text


def _check_model(name: str, models: Sequence[ModelInfo], source: str) -> None:
    """Raises InvalidArgument unless a model has this name. `source`: what named it."""
    served = [one.id for one in models]
    if name not in served:
        raise InvalidArgument(
            f"{source}: {name!r:.80} is not served; served are {', '.join(served)}", field="model"
        )


def _is_terminal() -> bool:
    # None if the process was started without stdin.
    return sys.stdin is not None and sys.stdin.isatty()


def _lines() -> Iterator[str]:
    """Yields the lines of stdin until its end. On a terminal, with a prompt and a history."""
    if not _is_terminal():
        if sys.stdin is not None:
            try:
                yield from bounded_lines(sys.stdin, MAX_PROMPT)
            except OSError as error:
                raise InvalidArgument(f"stdin cannot be read: {error.strerror}") from None
        return
    history = _open_history()
    try:
        while True:
            try:
                yield input(_PROMPT)
            except KeyboardInterrupt:
                print()
    except (EOFError, OSError):
        # A terminal that was closed takes no line. SIGHUP may be ignored, as nohup does.
        with suppress(OSError):
            print(flush=True)
    finally:
        _save_history(history)


def _open_history() -> Path | None:
    """Loads the lines of earlier conversations. Returns their file, or None without readline or a
    folder to write to.
    """
    try:
        import readline
    except ImportError:  # Python without readline
        return None
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    file = Path(home).expanduser() / "kvrelay" / "chat_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        readline.read_history_file(file)
    except OSError:
        return None
    return file


def _save_history(file: Path | None) -> None:
    if file is None:
        return
    import readline

    readline.set_history_length(1000)
    try:
        readline.write_history_file(file)
    except OSError as error:
        note(f"{file}: {error.strerror}")
