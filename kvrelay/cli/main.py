"""The `kvrelay` command."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from kvrelay.cli import (
    adapters,
    autoscale,
    certs,
    chat,
    check,
    controller,
    demo,
    generate,
    kv_store,
    pools,
    router,
    serve,
    status,
    token,
    version,
)
from kvrelay.cli.entry import INTERRUPTED
from kvrelay.cli.experiments import bench, lab, profile, simulate, verify
from kvrelay.cli.loadtest import app as loadtest
from kvrelay.cli.options.variables import misspelled, with_variables
from kvrelay.cli.plan import command as plan
from kvrelay.cli.terminal.help_page import App
from kvrelay.cli.terminal.notes import note, wrapped
from kvrelay.errors import InvalidArgument, KvRelayError
from kvrelay.process.child import REASON_FILE

app = App(
    help="Serve large language models from two pools: prefill and decode.",
    epilog='Example: kvrelay serve, then in another terminal: kvrelay generate "Once upon a time"',
    context_settings={"auto_envvar_prefix": "KVRELAY", "help_option_names": ["-h", "--help"]},
)
for command in (
    serve.serve,
    check.check,
    plan.plan,
    demo.demo,
    verify.verify,
    profile.profile,
    simulate.simulate,
    lab.lab,
    generate.generate,
    chat.chat,
    status.status,
    status.top,
    pools.scale,
    pools.drain,
    pools.restart,
    router.router,
    controller.controller,
    kv_store.kv_store,
    certs.certs,
    version.version,
):
    app.command()(command)
app.add_typer(loadtest.app, name="loadtest")
app.add_typer(bench.app, name="bench")
app.add_typer(autoscale.app, name="autoscale")
app.add_typer(token.app, name="token")
app.add_typer(adapters.app, name="adapters")

# Usage errors. Some versions of typer contain click, others import it.
_UsageError: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", allow_from_autoenv=False, help="Print the version and exit."),
    ] = False,
) -> None:
    """Prints the version or the help. A command of its own does everything else."""
    if version:
        import kvrelay

        typer.echo(f"kvrelay {kvrelay.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


# Words of libraries, and what replaces them.
_NOISE = (
    (
        r"Input should be (greater|less) than or equal to (\S+)",
        r"it must be \1 than or equal to \2",
    ),
    (r"Input should be a valid number, unable to parse string as a number", "it must be a number"),
    (
        r"Input should be a valid integer, unable to parse string as an integer",
        "it must be a whole number",
    ),
    (
        r"Input should be a valid boolean, unable to interpret input",
        "it must be true or false",
    ),
)
# What to do with words that a command takes no more of, by command.
_MORE_WORDS = {
    "kvrelay generate": "put text with spaces in quotes",
    "kvrelay chat": "type the text once it has started, or give it to `kvrelay generate`",
}
# Options that other commands have: command, option, and what to give instead.
_OPTIONS_ELSEWHERE = (
    ("kvrelay scale", "--(prefill|decode)", r"write \2=N"),
    (
        "kvrelay (status|top|scale|drain|restart|adapters .*)",
        "--(target|grpc-port|http-port)",
        "give the admin port with --admin HOST:PORT",
    ),
    (
        "kvrelay (generate|chat)",
        "--(admin|grpc-port|admin-port|http-port)",
        "give the gRPC port with --target HOST:PORT",
    ),
)


_ROOT = Path(__file__).resolve().parents[2]
# A full or read-only disk.
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code: 2 for bad usage, 1 for a failure in the
    cluster.
    """
    try:
        code = app(args=list(arguments), prog_name="kvrelay", standalone_mode=False)
        _flush_output()
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else _command_of(arguments)
        message = cast(Any, error).format_message().rstrip(".")
        for noise, said in _NOISE:
            message = re.sub(noise, said, message)
        # As the help page writes it.
        message = re.sub(r"(?<=Missing argument )'\w+'", lambda one: one[0].upper(), message)
        if "unexpected extra argument" in message and (remedy := _MORE_WORDS.get(where)):
            message += f"; {remedy}"
        for command, option, remedy in _OPTIONS_ELSEWHERE:
            if re.fullmatch(command, where):
                message = re.sub(f"(No such option: {option}).*", rf"\1; {remedy}", message)
        if (owners := _subcommands_with(error)) and context is not None:
            message = re.sub("( Did you mean.*)?$", "", message).rstrip(";. ")
            message += f"; it belongs to {' and '.join(f'{where} {name}' for name in owners)}"
        if context is not None:
            message = with_variables(message, context)
            if message == "Missing command":
                *others, last = context.command.commands
                message += f"; give {' or '.join(filter(None, (', '.join(others), last)))}"
        return _fail(2, f"{message}{' See' if message.endswith('?') else '; see'} {where} --help")
    except KvRelayError as error:
        for line in "\n".join(getattr(error, "__notes__", ())).splitlines():
            typer.echo(wrapped(line, sys.stderr), err=True)
        return _fail(2 if isinstance(error, InvalidArgument) else 1, error.message)
    except OSError as error:
        if error.errno not in _OF_THE_MACHINE:
            raise
        if error.filename:
            return _fail(1, f"{error.filename}: {error.strerror}")
        _drop_output()
        return _fail(1, f"the output: {error.strerror}")
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return code or 0


def _flush_output() -> None:
    """Writes what is left in the buffer of the output. A pipe or a terminal that is closed needs no
    more. Raises OSError, as for a full disk.
    """
    if sys.stdout is None:
        # The shell has closed it.
        return
    try:
        sys.stdout.flush()
    except OSError as error:
        _drop_output()
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise


def _drop_output() -> None:
    """Drops what cannot be written. Python would try it again at the end of the process."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _subcommands_with(error: Any) -> list[str]:
    """The commands of a group that have the option which the group itself lacks."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    commands: dict[str, Any] = getattr(getattr(context, "command", None), "commands", {})
    return [
        name
        for name, command in commands.items()
        if option and any(option in one.opts for one in command.params)
    ]


def _command_of(arguments: Sequence[str]) -> str:
    """Returns the command that the arguments begin with, as its help names it."""
    names = ["kvrelay"]
    command: Any = typer.main.get_command(app)
    for word in arguments:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        names.append(word)
    return " ".join(names)


def _fail(code: int, message: str) -> int:
    """Prints the error as one line, or writes it to the file of the process that started this
    command.
    """
    line = " ".join(message.split())
    if path := os.environ.get(REASON_FILE):
        with open(path, "w") as file:
            file.write(line)
    else:
        note(line)
    return code


def prepare() -> None:
    """Sets up this process, and the environment of those that it starts."""
    # gRPC's notes on connections are not for users.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # Child processes only start other programs. With its support for forks, gRPC starts threads
    # in a child before that, and sometimes they crash it: https://github.com/grpc/grpc/issues/43055
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    # Ray reads docstrings.
    os.environ.pop("PYTHONOPTIMIZE", None)
    # A file of the user, such as types.py, must not replace a module in the processes to start.
    if Path.cwd() != _ROOT:
        os.environ["PYTHONSAFEPATH"] = "1"
    for stream in (sys.stdout, sys.stderr):
        # A terminal may not know each character of a table. In a file of both streams, lines keep
        # their order.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace", line_buffering=True)
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")


def main() -> None:
    """Runs the command line of this process and exits with its code."""
    try:
        prepare()
    except FileNotFoundError:
        sys.exit(_fail(1, "the current folder does not exist any more; change to another one"))
    # Of the commands that another one starts, that one has spoken.
    if REASON_FILE not in os.environ:
        for line in misspelled(os.environ):
            note(line)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
