"""The names that a JSON schema gives its parts. Pure.

llguidance knows the parts of a schema by their $id. Of two parts with the same $id, the last one
takes the place of the other, even if that is the whole schema: then none of its keywords binds an
answer.
"""

from __future__ import annotations

import json
import posixpath
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from kvrelay.engine.sampling.schema_keywords import inner_schemas

# The URI of a schema without an $id, and the scheme of the one that llguidance gives it.
_BASE = "http://schema/"
_RESERVED = "json-schema"
# References can be resolved against URIs of these.
_HIERARCHICAL = ("http", "https")
_DRAFT_4 = "json-schema.org/draft-04"
# Parts with an $id, and characters of the URI of each, which is resolved against those around it:
# the router's event loop waits for the check.
_MOST_IDS, _MOST_URI = 100, 500


def check_ids(schema: Any) -> None:
    """Raises ValueError if a part of the schema has the $id of the whole or of another part, and
    for more or longer names than a request may cost.
    """
    names = ("$id", "id") if _DRAFT_4 in json.dumps(schema) else ("$id",)
    known: set[str] = set()
    parts: list[tuple[Any, str]] = [(schema, _BASE)]
    while parts:
        part, base = parts.pop()
        if isinstance(part, list):
            parts += ((one, base) for one in part)
        elif isinstance(part, dict):
            own = next((part[name] for name in names if isinstance(part.get(name), str)), None)
            if own is not None or not known:
                base = _absolute(base, own or "")
                if base in known:
                    raise ValueError(
                        f"a part of the schema has the $id {own!r:.100}, which is that of the "
                        "whole schema or of another part; leave it out"
                    )
                if len(known) > _MOST_IDS:
                    raise ValueError(
                        f"more than {_MOST_IDS} parts of the schema have an $id; use $defs"
                    )
                known.add(base)
            parts += ((one, base) for one in inner_schemas(part))


def _absolute(base: str, reference: str) -> str:
    """Returns the URI that a reference names, in a form that equal URIs have in common. Raises
    ValueError if that cannot be told.
    """
    if len(reference) > _MOST_URI:
        raise _too_long(reference)
    reference = reference.rstrip("#")
    if not urlsplit(reference).scheme:
        if reference and urlsplit(base).scheme not in _HIERARCHICAL:
            raise ValueError(
                f"the $id {reference!r:.100} in the schema is relative to {base!r:.100}; give a "
                "whole URI"
            )
        reference = urljoin(base, reference) if reference else base
        if len(reference) > _MOST_URI:
            raise _too_long(reference)
    found = urlsplit(reference)
    if found.scheme == _RESERVED:
        raise ValueError(f"the $id {reference!r:.100} in the schema is reserved; leave it out")
    path = unquote(found.path)
    if found.scheme in _HIERARCHICAL:
        end = "/" if path.endswith(("/", "/.", "/..")) else ""
        path = posixpath.normpath(path or "/").rstrip("/") + end
    # An empty query is none, as an empty fragment is.
    return urlunsplit(found._replace(netloc=found.netloc.lower(), path=path))


def _too_long(uri: str) -> ValueError:
    return ValueError(
        f"the $id {uri:.100} in the schema has {len(uri)} characters; allowed are {_MOST_URI}"
    )
