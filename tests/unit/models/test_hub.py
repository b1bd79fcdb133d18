from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.hub_stand_in import MODEL, HubStandIn

from kvrelay.models.hub import cache_of

CONFIGURATION = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
# A folder of a model has these too; other engines read them.
OTHERS = ("pytorch_model.bin", "consolidated.safetensors", "onnx/config.json", "README.md")


def environment(url: str, home: Path, **variables: str) -> dict[str, str]:
    """Without the settings of the tests that forbid downloads."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**kept, "HF_ENDPOINT": url, "HF_HOME": str(home), **variables}


def download(model: str, env: dict[str, str]) -> tuple[int, list[dict[str, object]]]:
    """Returns the exit code and what the download prints."""
    done = subprocess.run(
        [sys.executable, "-m", "kvrelay.models.hub", model],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def refusal(model: str, env: dict[str, str]) -> str:
    code, (*_, answer) = download(model, env)
    assert code == 1
    return str(answer["error"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with the weights in one file and in formats that nobody here reads."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for name in CONFIGURATION:
        (folder / name).write_text(json.dumps({"name": name}))
    (folder / "model.safetensors").write_bytes(os.urandom(300_000))
    for name in OTHERS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"other")
    return folder


def test_downloads_what_is_read_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    with HubStandIn(folder) as hub:
        code, (missing, done) = download(MODEL, environment(hub.url, tmp_path))
        assert code == 0
        assert missing == {"folder": str(tmp_path / "hub"), "num_bytes": 300_000}
        assert set(hub.downloads) == CONFIGURATION | {"model.safetensors"}
        cached = Path(str(done["model_folder"]))
        assert {one.name for one in cached.iterdir()} == CONFIGURATION | {"model.safetensors"}
        assert cache_of(cached) == tmp_path / "hub"
        _, (missing, again) = download(MODEL, environment(hub.url, tmp_path))
    assert (missing["num_bytes"], again) == (0, done)


def test_shards_by_the_names_of_the_index(folder: Path, tmp_path: Path) -> None:
    shards = [f"weights-{number}.safetensors" for number in range(3)]
    (folder / "model.safetensors").unlink()
    for name in shards:
        (folder / name).write_bytes(os.urandom(1000))
    index = {"weight_map": {f"tensor {one}": name for one, name in enumerate(shards)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with HubStandIn(folder) as hub:
        assert download(MODEL, environment(hub.url, tmp_path))[0] == 0
    assert set(shards) < set(hub.downloads)
    assert "consolidated.safetensors" not in hub.downloads


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}', "[" * 10**5])
@pytest.mark.sweep(3)
def test_a_bad_index_is_left_to_the_loader(folder: Path, tmp_path: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with HubStandIn(folder) as hub:
        assert download(MODEL, environment(hub.url, tmp_path))[0] == 0
    assert "model.safetensors" in hub.downloads


@pytest.mark.long
def test_complete_files_are_kept_when_the_hub_fails(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    names = ["a.safetensors", "b.safetensors"]
    for name in names:
        (folder / name).write_bytes(os.urandom(200_000))
    index = {"weight_map": dict(zip("xy", names, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def gone(name: str, sent: int) -> None:
        if name == names[1]:
            raise BrokenPipeError

    with HubStandIn(folder) as hub:
        hub.before_part = gone
        assert "cannot provide the model" in refusal(MODEL, environment(hub.url, tmp_path))
    with HubStandIn(folder) as hub:
        assert download(MODEL, environment(hub.url, tmp_path))[0] == 0
    assert hub.downloads == names[1:]


def test_a_cut_connection_continues_where_it_was_cut(folder: Path, tmp_path: Path) -> None:
    cuts = []

    def cut_once(name: str, sent: int) -> None:
        if sent > 100_000 and not cuts:
            cuts.append(sent)
            raise BrokenPipeError

    with HubStandIn(folder) as hub:
        hub.before_part = cut_once
        code, (_, done) = download(MODEL, environment(hub.url, tmp_path))
    assert (code, len(cuts)) == (0, 1)
    cached = Path(str(done["model_folder"])) / "model.safetensors"
    assert cached.read_bytes() == (folder / "model.safetensors").read_bytes()


class TestRefusals:
    @pytest.mark.parametrize(
        ("answer", "expected"),
        [
            ((404, "RepoNotFound"), "has no such model, or it is private: .* set HF_TOKEN"),
            ((401, "RepoNotFound"), "has no such model, or it is private: .* set HF_TOKEN"),
            ((403, "GatedRepo"), "accept its terms: .* set HF_TOKEN"),
            ((500, ""), "cannot be reached at .*: check the connection and HF_ENDPOINT"),
        ],
    )
    def test_by_the_hub(
        self, folder: Path, tmp_path: Path, answer: tuple[int, str], expected: str
    ) -> None:
        with HubStandIn(folder) as hub:
            hub.refusals["someone/other"] = answer
            message = refusal("someone/other", environment(hub.url, tmp_path))
        assert message.startswith("model 'someone/other': the folder does not exist, and ")
        assert re.search(expected, message)

    @pytest.mark.parametrize("name", ["a/b..c", "a/b.git", "a/" + "b" * 200, "a/-b-"])
    def test_a_name_that_no_model_can_have(self, tmp_path: Path, name: str) -> None:
        message = refusal(name, environment("http://127.0.0.1:1", tmp_path))
        assert message.startswith(f"model {name!r}: ")

    @pytest.mark.parametrize("url", ["garbage", "127.0.0.1:8080", "ftp://host"])
    def test_an_address_of_the_hub_that_is_none(self, tmp_path: Path, url: str) -> None:
        message = refusal("a/b", environment(url, tmp_path))
        assert f"HF_ENDPOINT is '{url}'; it must begin with https://" in message

    @pytest.mark.parametrize("offline", [True, False])
    def test_not_in_the_cache(self, tmp_path: Path, offline: bool) -> None:
        variables = {"HF_HUB_OFFLINE": "1"} if offline else {}
        message = refusal(MODEL, environment("http://127.0.0.1:1", tmp_path, **variables))
        assert f"the model is not in {tmp_path / 'hub'}" in message
        assert ("HF_HUB_OFFLINE forbids" if offline else "HF_ENDPOINT") in message

    @pytest.mark.long
    def test_a_part_in_the_cache(self, folder: Path, tmp_path: Path) -> None:
        def gone(name: str, sent: int) -> None:
            if name == "model.safetensors":
                raise BrokenPipeError

        with HubStandIn(folder) as hub:
            hub.before_part = gone
            refusal(MODEL, environment(hub.url, tmp_path))
        for variables in ({"HF_HUB_OFFLINE": "1"}, {}):
            message = refusal(MODEL, environment("http://127.0.0.1:1", tmp_path, **variables))
            assert "only a part of the model is in" in message


@pytest.mark.parametrize("offline", [True, False])
def test_the_cache_serves_without_the_hub(folder: Path, tmp_path: Path, offline: bool) -> None:
    with HubStandIn(folder) as hub:
        _, (_, done) = download(MODEL, environment(hub.url, tmp_path))
    variables = {"HF_HUB_OFFLINE": "1"} if offline else {}
    url = "http://127.0.0.1:1"
    code, answers = download(MODEL, environment(url, tmp_path, **variables))
    assert code == 0
    assert [one.get("num_bytes", one.get("model_folder")) for one in answers] == [
        0,
        done["model_folder"],
    ]


def test_another_folder_has_no_cache(tmp_path: Path) -> None:
    assert cache_of(tmp_path) is None
    assert cache_of(tmp_path / "snapshots" / "x") is None
