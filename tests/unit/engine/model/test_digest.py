"""A model's id changes with every byte of its files, and costs one reading of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvrelay.engine.model.digest as model_digest_module
from kvrelay.engine.model.checkpoint import find_checkpoint
from kvrelay.engine.model.digest import model_digest
from kvrelay.errors import ModelRefused
from kvrelay.models.model_identity import SETTINGS, tokenizer_id

LONG_AGO_NS = 10**18


def settle(path: Path) -> None:
    """As if the file had been written long ago: its change time, which cannot be set, is taken as
    old.
    """
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))


@pytest.fixture
def folder(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """Of a model of this test's own."""
    return Path(shutil.copytree(tiny_model(), tmp_path / "model"))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are kept at once."""
    monkeypatch.setattr(model_digest_module, "SETTLED_NS", 0)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_byte_of_any_file_makes_another_id(data: st.DataObject, folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    files = find_checkpoint(str(folder)).files
    before = model_digest(files)
    path = data.draw(st.sampled_from(files))
    offset = data.draw(st.integers(0, path.stat().st_size - 1))
    flip = data.draw(st.integers(1, 255))
    found = bytearray(path.read_bytes())
    found[offset] ^= flip
    path.write_bytes(found)
    assert model_digest(files) != before, f"byte {offset} of {path.name}"
    found[offset] ^= flip
    path.write_bytes(found)
    assert model_digest(files) == before


@pytest.mark.parametrize("name", SETTINGS)
def test_each_file_counts(name: str, folder: Path) -> None:
    before = find_checkpoint(str(folder)).model_id
    path = folder / name
    path.write_text(path.read_text() + " " if path.exists() else "{}")
    assert find_checkpoint(str(folder)).model_id != before


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    size=st.integers(0, 400), offset=st.integers(0, 399), part=st.sampled_from([7, 64, 100, 400])
)
def test_parts_and_reads_of_any_size_cover_every_byte(
    size: int, offset: int, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_digest_module, "PART_BYTES", part)
    monkeypatch.setattr(model_digest_module, "READ_BYTES", 5)
    path = tmp_path / "weights"
    content = bytearray(size)
    path.write_bytes(content)
    before = model_digest([path], tmp_path / "cache")
    if offset < size:
        content[offset] = 1
        path.write_bytes(content)
        assert model_digest([path], tmp_path / "cache") != before


def test_a_file_that_has_not_changed_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: None
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 100)
    first = model_digest([path], tmp_path / "cache")
    monkeypatch.setattr(
        model_digest_module, "_part_digest", lambda *_: pytest.fail("the file is read again")
    )
    assert model_digest([path], tmp_path / "cache") == first


def test_a_file_that_was_replaced_with_its_old_times_is_read_again(
    tmp_path: Path, kept: None
) -> None:
    path, other = tmp_path / "weights", tmp_path / "other"
    path.write_bytes(b"x" * 100)
    settle(path)
    first = model_digest([path], tmp_path / "cache")
    other.write_bytes(b"y" * 100)
    other.replace(path)
    settle(path)
    assert model_digest([path], tmp_path / "cache") != first


def test_a_file_that_was_written_lately_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x")
    model_digest([path], tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"file": 1}', b"\xff"])
def test_rubbish_in_the_cache_is_written_over(content: bytes, tmp_path: Path, kept: None) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x")
    first = model_digest([path], tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    good = entry.read_bytes()
    entry.write_bytes(content)
    assert model_digest([path], tmp_path / "cache") == first
    assert entry.read_bytes() == good


def test_a_cache_that_cannot_be_written_to_is_done_without(tmp_path: Path, kept: None) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x")
    (tmp_path / "cache").write_text("a file, where a folder is due")
    assert model_digest([path], tmp_path / "cache") == model_digest([path], tmp_path / "another")


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 100)

    def written_to(*_: object) -> bytes:
        path.write_bytes(b"y" * 101)
        return b""

    monkeypatch.setattr(model_digest_module, "_part_digest", written_to)
    with pytest.raises(ModelRefused, match="changed while it was read"):
        model_digest([path], tmp_path / "cache")


def test_a_tokenizer_has_an_id_of_its_own(tmp_path: Path) -> None:
    assert tokenizer_id(tmp_path) == ""
    (tmp_path / "tokenizer.json").write_text("{}")
    first = tokenizer_id(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert tokenizer_id(tmp_path) == first
    (tmp_path / "tokenizer.json").write_text("{ }")
    assert tokenizer_id(tmp_path) not in ("", first)
