"""Names of files that cannot be read, in error messages."""

from __future__ import annotations

from pathlib import Path

# Characters of a name. A configuration may give any text as one.
MOST = 300


def shown_name(path: str | Path) -> str:
    """Returns the name, shortened and in ASCII if it is long or not printable."""
    name = str(path)
    return name if len(name) <= MOST and name.isprintable() else f"{name!a:.{MOST}}"


def why_unreadable(error: OSError | ValueError) -> str:
    """Returns why a file could not be opened. A ValueError is about a name with a NUL, or with half
    of a surrogate pair.
    """
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or "no file has such a name"
