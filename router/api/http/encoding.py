"""Encodes JSON and server-sent events. Pure."""

from __future__ import annotations

import json


def to_json(body: object) -> str:
    """Encodes in ASCII: some clients take U+2028 and similar characters for the end of a line, and
    so of an event.
    """
    return json.dumps(body, separators=(",", ":"))


def event(body: object) -> str:
    """Encodes the body as a server-sent event."""
    return f"data: {to_json(body)}\n\n"


def named_event(name: str, data: str) -> str:
    """Returns a server-sent event with a name. `data`: JSON."""
    return f"event: {name}\ndata: {data}\n\n"
