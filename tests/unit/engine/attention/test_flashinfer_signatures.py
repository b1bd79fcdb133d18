"""Each call that the engine makes is one that flashinfer's releases take, and one that the stand-in
of the other tests takes in the same way.
"""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from support import flashinfer_stand_in
from support.graph_stand_ins import Programs, cuda_forward_runner

from kvrelay.engine.sequence_segment import Segment

RECORDED = json.loads((Path(__file__).parent / "flashinfer_signatures.json").read_text())
ROOT = Path(__file__).resolve().parents[4]
METHODS = ("__init__", "plan", "run")
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def signature_of(parameters: str) -> inspect.Signature:
    return inspect.signature(eval(f"lambda {parameters}: None"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls of the stand-in's class."""
    flashinfer_stand_in.install(monkeypatch)
    found: list[Call] = []
    kind = flashinfer_stand_in.BatchPrefillWithPagedKVCacheWrapper

    def noted(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        def call(*positional: Any, **named: Any) -> Any:
            found.append((name, positional, named))
            return method(*positional, **named)

        return call

    for name in METHODS:
        monkeypatch.setattr(kind, name, noted(name))
    return found


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda one: one["releases"][0])
def test_calls_are_those_that_a_release_takes(
    recorded: dict[str, Any], calls: list[Call], tiny_model: Callable[[str], Path]
) -> None:
    runner, _ = cuda_forward_runner(tiny_model("gemma2"), Programs(), capture=2)
    runner.forward([Segment([5, 6, 7], 0, [3]), Segment([5], 2, [4])], [0])
    assert {name for name, _, _ in calls} == set(METHODS)
    for name, positional, named in calls:
        signature = signature_of(recorded["methods"][name])
        taken = signature.bind(*positional, **named)
        assert not taken.arguments.get("args"), "an argument without a name would change meaning"


def test_a_call_that_no_release_takes_would_show() -> None:
    for recorded in RECORDED:
        with pytest.raises(TypeError):
            signature_of(recorded["methods"]["plan"]).bind(None, 1, 2, 3, 4, 5, 6, 7, 8, scale=1.0)


def test_the_releases_are_those_that_the_project_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = map(Requirement, project["optional-dependencies"]["cuda"])
    releases = [release for recorded in RECORDED for release in recorded["releases"]]
    assert all(wanted.specifier.contains(release) for release in releases)
    lock = (ROOT / "requirements" / "cuda.lock").read_text()
    (pinned,) = [
        line.split()[0].partition("==")[2]
        for line in lock.splitlines()
        if line.startswith("flashinfer-python==")
    ]
    assert pinned in releases


def test_the_stand_in_names_parameters_as_flashinfer_does() -> None:
    kind = flashinfer_stand_in.BatchPrefillWithPagedKVCacheWrapper
    for recorded in RECORDED:
        for name in METHODS:
            theirs = list(signature_of(recorded["methods"][name]).parameters)
            ours = [
                one.name
                for one in inspect.signature(getattr(kind, name)).parameters.values()
                if one.kind is not one.VAR_KEYWORD
            ]
            assert set(ours) <= set(theirs)
            positional = [one for one in ours if one in theirs[: len(ours)]]
            assert positional == [one for one in theirs[: len(ours)] if one in ours]
