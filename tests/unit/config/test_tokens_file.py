"""The file of tenants: what is read, what is refused, and that no message repeats a token."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvrelay.config.tokens_file import digest_of, load_tokens, new_token
from kvrelay.errors import ConfigError
from kvrelay.tenants import Tenant

A, B, C = (hashlib.sha256(text.encode()).hexdigest() for text in "abc")
SECRET = "kvr_this-is-a-token-in-plain-words"

GOOD = f"""
tenants:
  - name: acme
    tokens_sha256: [{A}, {B}]
    weight: 2
    max_running: 64
    requests_per_minute: 600
    tokens_per_minute: 100000
  - {{name: ops, tokens_sha256: [{C}], roles: [admin]}}
"""

# name: (text, line, what the message says after FILE:LINE)
BAD = {
    "nothing": ("", 1, "tenants: is missing"),
    "nobody": ("tenants: []\n", 1, "tenants: has 0 entries; allowed are 1 to 1000"),
    "unknown key": (
        f"tenants:\n  - name: a\n    tokens_sha256: [{A}]\n    token: {SECRET}\n",
        4,
        "tenants[0].token: unknown key; allowed are name, tokens_sha256, roles,",
    ),
    "a key nearly right": (
        f"tenants:\n  - name: a\n    token_sha256: [{A}]\n",
        3,
        "tenants[0].token_sha256: unknown key; did you mean tokens_sha256? allowed are name,",
    ),
    "no tokens": ("tenants:\n  - name: a\n    tokens_sha256: "
                  "[]\n", 3, "tenants[0].tokens_sha256: has 0 entries"),
    "a token in plain words": (
        f"tenants:\n  - name: a\n    tokens_sha256:\n      - {A}\n      - {SECRET}\n",
        5,
        "tenants[0].tokens_sha256[1]: must be the SHA-256 of a token as 64 hexadecimal digits",
    ),
    "a token where a list is due": (
        f"tenants:\n  - name: a\n    tokens_sha256: "
        f"{SECRET}\n", 3, "tenants[0].tokens_sha256: must be a list",
    ),
    "a token as a role": (
        f"tenants:\n  - name: a\n    tokens_sha256: [{A}]\n    roles: "
        f"[{SECRET}]\n", 4, "tenants[0].roles[0]: must be",
    ),
    "a token as a name": (
        f"tenants:\n  - name: '{SECRET} '\n    tokens_sha256: "
        f"[{A}]\n", 2, "tenants[0].name: must be 1 to 63 letters",
    ),
    "a token for two": (
        f"tenants:\n  - {{name: a, tokens_sha256: [{A}]}}\n  - name: b\n    tokens_sha256:\n      "
        f"- {B}\n      - {A}\n",
        6,
        "tenants[1].tokens_sha256[1]: this token belongs to a",
    ),
    "a token twice": (
        f"tenants:\n  - name: a\n    tokens_sha256: [{A}, {A}]\n",
        3,
        "tenants[0].tokens_sha256[1]: this token belongs to a",
    ),
    "a name twice": (
        f"tenants:\n  - {{name: a, tokens_sha256: [{A}]}}\n  - {{name: a, tokens_sha256: [{B}]}}\n",
        3,
        "tenants[1].name: a is the name of an earlier tenant",
    ),
    "a name with a "
    "slash": (f"tenants:\n  - {{name: a/b, tokens_sha256: "
              f"[{A}]}}\n", 2, "tenants[0].name: must be"),
    "an unknown role": (
        f"tenants:\n  - name: a\n    tokens_sha256: [{A}]\n    roles: [root]\n",
        4,
        "tenants[0].roles[0]: must be 'client'",
    ),
    "no weight": (
        f"tenants:\n  - {{name: a, tokens_sha256: [{A}], weight: "
        f"0}}\n", 2, "tenants[0].weight: must be above 0",
    ),
    "a weight that is no number": (
        f"tenants:\n  - {{name: a, tokens_sha256: [{A}], weight: "
        f".nan}}\n", 2, "tenants[0].weight: must be",
    ),
    "no requests": (
        f"tenants:\n  - {{name: a, tokens_sha256: [{A}], requests_per_minute: 0}}\n",
        2,
        "tenants[0].requests_per_minute: must be above 0",
    ),
}  # fmt: skip


def write(folder: Path, text: str) -> Path:
    path = folder / "tokens.yaml"
    path.write_text(text)
    return path


def test_each_token_leads_to_its_tenant(tmp_path: Path) -> None:
    tenants = load_tokens(write(tmp_path, GOOD))
    acme, ops = tenants[bytes.fromhex(A)], tenants[bytes.fromhex(C)]
    assert tenants[bytes.fromhex(B)] is not None
    assert acme == Tenant(
        name="acme",
        roles=frozenset({"client"}),
        weight=2.0,
        max_running=64,
        requests_per_minute=600,
        tokens_per_minute=100_000,
        salt=acme.salt,
        min_priority=0,
    )
    assert acme == tenants[bytes.fromhex(B)]
    assert (ops.name, ops.roles, ops.weight) == ("ops", frozenset({"admin"}), 1.0)
    assert (ops.max_running, ops.requests_per_minute, ops.tokens_per_minute) == (None, None, None)


def test_salts_are_the_same_whoever_reads_the_file_and_no_two_tenants_share_one(
    tmp_path: Path,
) -> None:
    first, again = load_tokens(write(tmp_path, GOOD)), load_tokens(write(tmp_path, GOOD))
    assert {key: one.salt for key, one in first.items()} == {
        key: one.salt for key, one in again.items()
    }
    assert len({one.salt for one in first.values()}) == 2
    # A token that is added behind the others leaves the salt, and so the cached prefixes, as they
    # were.
    more = load_tokens(write(tmp_path, GOOD.replace(f"{B}]", f"{B}, {'0' * 64}]")))
    assert more[bytes.fromhex(A)].salt == first[bytes.fromhex(A)].salt
    # Another tenant cannot know it: it depends on a token and not on the name alone.
    other = load_tokens(write(tmp_path, GOOD.replace(f"[{A}, {B}]", f"[{B}]")))
    assert other[bytes.fromhex(B)].salt != first[bytes.fromhex(A)].salt


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_its_line_and_without_its_values(
    tmp_path: Path, name: str
) -> None:
    text, line, message = BAD[name]
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_tokens(path)
    assert caught.value.message.startswith(f"{path}:{line}: {message}")
    assert SECRET not in caught.value.message


def test_tokens_are_long_and_random() -> None:
    made = {new_token() for _ in range(100)}
    assert len(made) == 100
    assert all(one.startswith("kvr_") and len(one) >= 47 for one in made)
    assert digest_of("a") == A
