"""The help pages of the commands: options in few lines, their environment variables at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


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
        names = filter(None, (_variable(param, ctx) for param in self.get_params(ctx)))
        variables = ", ".join(dict.fromkeys(names))
        self.epilog = "\n\n".join(
            filter(
                None,
                (self._given_epilog, variables and f"Options as variables: {variables}"),
            )
        )
        super().format_help(ctx, formatter)  # type: ignore[misc]


class _Command(_Page, TyperCommand):
    """A command."""


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


def _variable(param: Any, ctx: Any) -> str | None:
    """Returns the name of the environment variable of an option, or None."""
    if param.param_type_name != "option" or param.hidden or param.is_eager:
        return None
    if param.envvar is not None:
        return str(param.envvar)
    if param.allow_from_autoenv and ctx.auto_envvar_prefix:
        return f"{ctx.auto_envvar_prefix}_{param.name.upper()}"
    return None
