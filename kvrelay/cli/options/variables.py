"""Environment variables in place of options: those that several commands share, names that look
like one of them, and those that an error is about.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any

VARIABLES = frozenset(
    f"KVRELAY_{name}"
    for name in (
        "ADMIN",
        "ADMIN_PORT",
        "CONFIG",
        "DECODE",
        "GRPC_PORT",
        "HTTP_PORT",
        "JSON",
        "KERNELS",
        "LOG_LEVEL",
        "MODEL",
        "PREFILL",
        "RAY_ADDRESS",
        "REASON_FILE",
        "TARGET",
        "TLS_CA",
        "TLS_CERT",
        "TLS_KEY",
        "TOKEN_FILE",
    )
)
# The address that an error begins with.
_SENDER = re.compile(r"^\S+:\d+: ")
# Of two names. Kubernetes sets variables such as KVRELAY_PORT for a service named kvrelay.
_LIKENESS = 0.9


def misspelled(names: Iterable[str]) -> Iterator[str]:
    """Yields a line for each name that is almost one of VARIABLES."""
    for name in sorted(set(names) - VARIABLES):
        if name.startswith("KVRELAY_"):
            for meant in difflib.get_close_matches(name, VARIABLES, 1, _LIKENESS):
                yield f"the variable {name} has no effect; did you mean {meant}?"


def variable_of(param: Any, context: Any) -> str | None:
    """Returns the name of the environment variable of an option, or None."""
    if param.param_type_name != "option" or param.hidden or param.is_eager:
        return None
    # Options of the library, such as --install-completion.
    if not param.expose_value:
        return None
    if param.envvar is not None:
        return str(param.envvar)
    if param.allow_from_autoenv and context.auto_envvar_prefix:
        return f"{context.auto_envvar_prefix}_{param.name.upper()}"
    return None


def with_variables(message: str, context: Any, *, is_answer: bool = False) -> str:
    """Adds to an error the variables that have set options of the command, as far as the error
    names the option or its value, and what to do. The user may not know of them.

    is_answer: a server refuses what was asked, and the message begins with the server's address.
    The address is not what was wrong.
    """
    subject = _SENDER.sub("", message) if is_answer else message
    found = []
    for param in context.command.params:
        source = context.get_parameter_source(param.name)
        name = variable_of(param, context)
        if name is None or name in message or source is None or source.name != "ENVIRONMENT":
            continue
        words = [*param.opts, param.value_from_envvar(context)]
        if any(re.search(rf"(?<!\w){re.escape(str(word))}(?!\w)", subject) for word in words):
            found.append((param.opts[0], name))
    if not found:
        return message
    sets = " and ".join(f"{name} sets {option}" for option, name in found)
    options = " and ".join(option for option, _ in found)
    names = " ".join(name for _, name in found)
    return (
        f"{message.rstrip('.')}; {sets}: give {options} on the command line, or run `unset {names}`"
    )
