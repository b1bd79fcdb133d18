"""Tenants for tests, with a token each."""

from __future__ import annotations

import json
from pathlib import Path

from kvrelay.config.tokens_file import digest_of, new_token


class Tokens:
    """A tokens file; `add` writes it anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, dict[str, object]] = {}

    def add(self, name: str, **entry: object) -> str:
        """Adds or changes a tenant; returns a new token, which is its only one."""
        token = new_token()
        self._entries[name] = {"name": name, "tokens_sha256": [digest_of(token)], **entry}
        self.write()
        return token

    def remove(self, name: str) -> None:
        del self._entries[name]
        self.write()

    def write(self) -> None:
        self.path.write_text(json.dumps({"tenants": list(self._entries.values())}))


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}
