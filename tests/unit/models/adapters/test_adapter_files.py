"""Adapter folders: what is read, the identity over every byte, and hostile folders."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.adapters import PREFIX, write_adapter

from kvrelay.errors import ModelRefused
from kvrelay.models.adapters.adapter_files import AdapterFiles, missing_modules, read_adapter

A, B = torch.arange(6.0).view(2, 3), torch.arange(8.0).view(4, 2)
SETTINGS = {"r": 2, "target_modules": ["q"]}


def folder_with(
    path: Path, tensors: dict[str, torch.Tensor] | None = None, **settings: object
) -> Path:
    if tensors is None:
        tensors = {f"{PREFIX}m.q.lora_A.weight": A, f"{PREFIX}m.q.lora_B.weight": B}
    write_adapter(path, tensors, {**SETTINGS, **settings})
    return path


def read(path: Path) -> AdapterFiles:
    return read_adapter(str(path), 64)


def refusal(path: Path) -> str:
    with pytest.raises(ModelRefused) as refused:
        read(path)
    message: str = refused.value.message
    assert "\n" not in message
    assert len(message) < 1000
    return message


def test_the_tensors_are_found_by_module(tmp_path: Path) -> None:
    files = read(folder_with(tmp_path))
    stored = files.factors["m.q"].a
    values = torch.frombuffer(bytearray(files.data[stored.start : stored.end]), dtype=torch.float32)
    assert torch.equal(values.view(stored.rows, stored.columns), A)


def test_each_byte_of_both_files_is_part_of_the_identity(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    first = read(folder).adapter_id
    assert read(folder).adapter_id == first
    weights = folder / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    second = read(folder).adapter_id
    config = folder / "adapter_config.json"
    config.write_text(config.read_text() + " ")
    assert len({first, second, read(folder).adapter_id}) == 3


def test_modules_that_the_list_names_need_tensors(tmp_path: Path) -> None:
    files = read(folder_with(tmp_path))
    assert missing_modules(files, iter(["m.q", "n.q", "m.k"])) == ["n.q"]
    ranged = read(folder_with(tmp_path, layers_to_transform=[0]))
    assert missing_modules(ranged, iter(["m.q", "n.q"])) == []


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({}, "the adapter has no tensors"),
        ({f"{PREFIX}m.q.lora_A.weight": A}, "m.q.lora_B.weight is missing"),
        (
            {f"{PREFIX}m.q.lora_A.weight": A, f"{PREFIX}m.q.lora_B.weight": B[:, :1]},
            "its rank is 2",
        ),
        ({f"{PREFIX}m.k.lora_A.weight": A}, "target_modules does not name"),
        ({f"{PREFIX}m.q.lora_magnitude_vector": A}, "DoRA"),
        ({f"{PREFIX}m.lora_embedding_A": A}, "embeddings"),
        ({"m.q.weight": A}, "not a factor of a LoRA layer"),
        ({f"{PREFIX}m.q.lora_A.weight": A[0]}, "not a matrix of"),
        ({f"{PREFIX}m.q.lora_A.weight": A.double()}, "not a matrix of"),
        ({f"{PREFIX}m.q.lora_A.weight": A[:0]}, "not a matrix of"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], reason: str
) -> None:
    assert reason in refusal(folder_with(tmp_path, tensors))


def test_a_long_name_of_a_module_is_refused(tmp_path: Path) -> None:
    # A pattern takes seconds to match a thousand characters, and no other thread runs meanwhile.
    for length, fits in ((128, True), (129, False)):
        module = "a." * (length // 2 - 1) + "x" * (length % 2) + ".q"
        tensors = {
            f"{PREFIX}{module}.lora_{side}.weight": one for side, one in (("A", A), ("B", B))
        }
        folder = folder_with(tmp_path / str(length), tensors, rank_pattern={"a?.*.*b": 3})
        if fits:
            assert list(read(folder).factors) == [module]
        else:
            assert "has 129 characters; the name of a module has at most 128" in refusal(folder)


def test_many_tensors_are_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    header = json.dumps({f"x{number}": {} for number in range(8193)}).encode()
    content = struct.pack("<Q", len(header)) + header
    (folder / "adapter_model.safetensors").write_bytes(content)
    assert "8193 tensors; allowed are 8192" in refusal(folder)


def test_a_rank_above_the_limit_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, r=65)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    assert "allowed is adapters.max_rank, 64" in refusal(folder)


def a_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def a_link_outside(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    outside = folder.parent / "elsewhere.safetensors"
    path.rename(outside)
    path.symlink_to(outside)


def a_loop_of_links(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.unlink()
    path.symlink_to(path)


def a_pipe(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.unlink()
    os.mkfifo(path)


def a_folder(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.unlink()
    path.mkdir()


def no_settings(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def a_list_of_settings(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[]")


def deep_settings(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"a":' * 10**5)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (a_pickle, "pickled weights can run code"),
        (a_link_outside, "points outside"),
        (a_loop_of_links, "cannot be read"),
        (a_pipe, "not a regular file"),
        (a_folder, "cannot be read|not a regular file"),
        (no_settings, "adapter_config.json is missing"),
        (a_list_of_settings, "not a JSON object"),
        (deep_settings, "it is not JSON, so the file is damaged"),
    ],
)
def test_hostile_folders_are_refused(
    tmp_path: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    folder = folder_with(tmp_path / "adapter")
    spoil(folder)
    assert re.search(reason, refusal(folder))


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert "there is no such folder" in refusal(tmp_path / "nowhere")
    assert "there is no such folder" in refusal(tmp_path / ("x" * 300))


NAME = f"{PREFIX}m.q.lora_A.weight"


@pytest.mark.parametrize(
    "header",
    [
        {NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 2**62]}},
        {NAME: {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 24]}},
        {NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]}},
        {NAME: {"dtype": "F32", "shape": [-2, -3], "data_offsets": [0, 24]}},
        {NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [-24, 0]}},
        {NAME: {"dtype": "I64", "shape": [1, 3], "data_offsets": [0, 24]}},
        {NAME: {"dtype": "F32", "shape": [2, 3]}},
        {NAME: 7},
        {"x" * 2000: 7},
        [],
    ],
)
def test_lying_headers_are_refused(tmp_path: Path, header: object) -> None:
    folder = folder_with(tmp_path)
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(24)
    (folder / "adapter_model.safetensors").write_bytes(data)
    refusal(folder)


@given(st.data())
def test_a_spoiled_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = folder_with(tmp_path_factory.mktemp("adapter"))
    path = folder / data.draw(st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        files = read(folder)
    except ModelRefused:
        return
    for stored in files.factors.values():
        assert 0 <= stored.a.start < stored.a.end <= len(files.data)
        assert stored.a.rows == stored.b.columns == files.config.rank
