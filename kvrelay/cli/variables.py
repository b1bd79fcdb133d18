"""The environment variables that several commands share, and names that look like one of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

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
# Of two names. Kubernetes sets variables such as KVRELAY_PORT for a service named kvrelay.
_LIKENESS = 0.9


def misspelled(names: Iterable[str]) -> Iterator[str]:
    """Yields a line for each name that is almost one of VARIABLES."""
    for name in sorted(set(names) - VARIABLES):
        if name.startswith("KVRELAY_"):
            for meant in difflib.get_close_matches(name, VARIABLES, 1, _LIKENESS):
                yield f"the variable {name} has no effect; did you mean {meant}?"
