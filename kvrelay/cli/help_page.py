"""The help pages of the commands: options in few lines, their environment variables at the end."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvrelay.cli.file_kinds import misplaced_file
from kvrelay.cli.variables import variable_of, with_variables
from kvrelay.errors import InvalidArgument, KvRelayError

# Columns of a panel before the descriptions: the frame, the names and the values of options.
_COLUMNS = 54


class _Page:
    """What a command and a group of commands change in typer's page."""

    help: str | None
    epilog: str | None
    collect_usage_pieces: Callable[[Any], list[str]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._given_epilog = self.epilog
        # The lines of a docstring are those of the source, not of the terminal.
        paragraphs = (self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(one.split()) for one in paragraphs)

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the options and arguments, without variables. Flags and arguments have no type,
        because a flag has no value and an argument has a name.
        """
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            param.show_envvar = False
            if getattr(param, "is_flag", False):
                param.metavar = ""
            if param.param_type_name == "argument":
                param.display_type_rich = _no_type
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
        width = shutil.get_terminal_size().columns
        if _fits_panels(self._texts(ctx), width):
            super().format_help(ctx, formatter)  # type: ignore[misc]
        else:
            formatter.write("\n".join(self._plain_lines(ctx, max(20, width))) + "\n")

    def _sections(self, ctx: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """Yields the lists of the page: title, and pairs of name and description."""
        params = self.get_params(ctx)
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            found = [
                param.get_help_record(ctx) for param in params if param.param_type_name == kind
            ]
            yield title, [record for record in found if record is not None]
        commands: Mapping[str, Any] = getattr(self, "commands", {})
        yield "Commands", [(name, one.get_short_help_str(500)) for name, one in commands.items()]

    def _texts(self, ctx: Any) -> Iterator[str]:
        for _, records in self._sections(ctx):
            for name, text in records:
                yield name.rpartition(" ")[2]
                yield text

    def _plain_lines(self, ctx: Any, width: int) -> Iterator[str]:
        """Yields the page without panels and columns, in which nothing is cut."""
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
            error.message = with_variables(error.message, ctx)
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


def _no_type(ctx: Any) -> None:
    """The type of a parameter that shows none."""


def _fits_panels(texts: Iterable[str], width: int) -> bool:
    """Whether typer's panels show the texts whole: they cut words that exceed the last column."""
    return (
        max((len(word) for text in texts for word in text.split()), default=0) <= width - _COLUMNS
    )


def _wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    space = " " * indent
    return textwrap.wrap(
        text, width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False
    )
