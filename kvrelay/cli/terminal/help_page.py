"""The help pages of the commands: one layout for all, their environment variables at the end."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvrelay.cli.options.file_kinds import misplaced_file
from kvrelay.cli.options.variables import variable_of, with_variables
from kvrelay.errors import DeadlineExceeded, InvalidArgument, KvRelayError, Unavailable

# Columns of a page on a wide terminal.
_WIDTH = 100
# Bounds of a number as click writes them, and in words.
_BOUNDS = (
    (r"\b(\S+)<=x<=(\S+?)(?=[\];])", r"\1 to \2"),
    (r"\bx>=(\S+?)(?=[\];])", r"at least \1"),
    (r"\bx<=(\S+?)(?=[\];])", r"at most \1"),
)


class _Page:
    """What a command and a group of commands change in typer's page."""

    help: str | None
    epilog: str | None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._given_epilog = self.epilog
        # The lines of a docstring are those of the source, not of the terminal.
        paragraphs = (self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(one.split()) for one in paragraphs)

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the options and arguments, without variables. Flags have no type, because they
        have no value.
        """
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            param.show_envvar = False
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the page, with the environment variables at its end."""
        names = filter(None, (variable_of(param, ctx) for param in self.get_params(ctx)))
        variables = ", ".join(dict.fromkeys(names))
        self.epilog = "\n\n".join(
            filter(
                None,
                (self._given_epilog, variables and f"Options as variables: {variables}"),
            )
        )
        width = min(_WIDTH, max(20, shutil.get_terminal_size().columns))
        formatter.write("\n".join(self._lines(ctx, width)) + "\n")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Returns the words behind the name of the command in its usage."""
        pieces = []
        for param in self.get_params(ctx):
            if param.param_type_name == "argument" and not param.hidden:
                name = _name(param)
                pieces.append(name if param.required or name[0] == "[" else f"[{name}]")
        return [*pieces, *(["COMMAND"] if hasattr(self, "commands") else []), "[OPTIONS]"]

    def _sections(self, ctx: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """Yields the lists of the page: title, and pairs of name and description."""
        commands: Mapping[str, Any] = getattr(self, "commands", {})
        yield "Commands", [(name, _summary(one)) for name, one in commands.items()]
        titles: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                kind = "Arguments" if is_argument else "Options"
                title = getattr(param, "rich_help_panel", None) or kind
                # click puts the choices between angle brackets, which look like a name.
                name = _name(param) if is_argument else re.sub("[<>]", "", record[0])
                text = record[1]
                for bounds, words in _BOUNDS:
                    text = re.sub(bounds, words, text)
                titles.setdefault(title, []).append((name, text))
        yield from titles.items()

    def _lines(self, ctx: Any, width: int) -> Iterator[str]:
        """Yields the page, in which nothing is cut."""
        yield from _wrapped(
            f"Usage: {ctx.command_path} {' '.join(self.collect_usage_pieces(ctx))}", width
        )
        for paragraph in (self.help or "").split("\n\n"):
            yield ""
            yield from _wrapped(paragraph, width)
        for title, records in self._sections(ctx):
            if records:
                yield from ("", f"{title}:")
            for name, text in records:
                yield from _wrapped(name, width, 2)
                yield from _wrapped(text, width, 6)
        for paragraph in (self.epilog or "").split("\n\n"):
            yield ""
            yield from _wrapped(paragraph, width)


class _Command(_Page, TyperCommand):
    """A command. Its errors name the variables that they are about."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command. Raises InvalidArgument for a file at the wrong option."""
        try:
            return super().invoke(ctx)
        except (KvRelayError, typer.BadParameter) as error:
            if told := misplaced_file(ctx):
                raise InvalidArgument(told) from error
            if isinstance(error, typer.BadParameter):
                raise
            is_answer = not isinstance(error, Unavailable | DeadlineExceeded)
            error.message = with_variables(error.message, ctx, is_answer=is_answer)
            raise


class _Group(_Page, TyperGroup):
    """A group of commands."""


class App(typer.Typer):
    """A group of commands whose help pages are these."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_Group, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """Adds a command. Options as in typer."""
        return super().command(name, cls=_Command, **options)


def _summary(command: Any) -> str:
    """Returns the first sentence of a command, and of a group the names of its commands too."""
    text = str(command.get_short_help_str(500))
    inner = getattr(command, "commands", {})
    return f"{text} Commands: {', '.join(inner)}." if inner else text


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    space = " " * indent
    return textwrap.wrap(
        text, width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False
    )
