"""A model's folder as `serve` looks at it, held to what safetensors itself takes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from kvrelay.errors import ModelRefused
from kvrelay.models.model_files import StoredTensor, check_model_files

WHOLE = save({"a": torch.zeros(3, 5), "b": torch.ones(7)}, metadata={"format": "pt"})
ONE_FOLDER = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def folder_with(path: Path, weights: bytes) -> Path:
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    return path


def test_tensors_of_whole_files_and_of_shards(tmp_path: Path) -> None:
    tensors = check_model_files(folder_with(tmp_path, WHOLE))
    assert sorted(tensors, key=lambda one: one.name) == [
        StoredTensor("a", "F32", (3, 5), 60),
        StoredTensor("b", "F32", (7,), 28),
    ]
    (tmp_path / "model.safetensors").unlink()
    shards = ["x-1.safetensors", "x-2.safetensors"]
    for shard in shards:
        save_file({shard: torch.zeros(4)}, tmp_path / shard)
    index = {"weight_map": {shard: shard for shard in shards}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [tensor.name for tensor in check_model_files(tmp_path)] == shards
    (tmp_path / shards[1]).unlink()
    with pytest.raises(ModelRefused, match=r"x-2.safetensors: cannot be read: No such file"):
        check_model_files(tmp_path)


@ONE_FOLDER
@given(st.integers(0, len(WHOLE) - 1))
def test_weights_that_are_cut_short_anywhere(tmp_path: Path, length: int) -> None:
    with pytest.raises(ModelRefused, match=r"model\.safetensors: .*; copy it again"):
        check_model_files(folder_with(tmp_path, WHOLE[:length]))


@ONE_FOLDER
@given(st.integers(0, len(WHOLE) - 1), st.binary(max_size=9))
def test_what_is_taken_by_safetensors_is_taken_and_nothing_else_is_raised(
    tmp_path: Path, at: int, other: bytes
) -> None:
    folder = folder_with(tmp_path, WHOLE[:at] + other + WHOLE[at + len(other) :])
    try:
        check_model_files(folder)
    except ModelRefused:
        with pytest.raises(SafetensorError):
            safe_open(folder / "model.safetensors", framework="pt").__enter__()


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": []}',
        b'{"a": {}}',
        b'{"a": {"data_offsets": []}}',
        b'{"a": {"data_offsets": [0, 1e999]}}',
        b"[" * 10**5,
        b"\xff\xff",
    ],
)
def test_headers_that_are_none(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(ModelRefused, match="safetensors header is invalid"):
        check_model_files(folder_with(tmp_path, struct.pack("<Q", len(header)) + header))
