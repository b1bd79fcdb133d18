"""The image: from locked versions that pyproject.toml allows, with what pods run in it and nothing
to build with.

The tests read the Dockerfile and build nothing; README.md of k8s/ says what has been tried.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
STAGES = re.split(r"^FROM .*$", DOCKERFILE, flags=re.MULTILINE)[1:]
DEPENDENCIES, KERNELS, APPLICATION, IMAGE = STAGES
TORCH = {"cpu": "2.13.0+cpu", "cuda": "2.13.0"}
EXTRAS = {"cpu": ("cluster", "otel"), "cuda": ("cluster", "otel", "vllm", "nixl")}


def pins(name: str) -> dict[str, Version]:
    """Of a lock file. Each of its entries is an exact version with the hashes of what may be
    installed as it.
    """
    found = {}
    for entry in re.split(
        r"\n(?=\S)", (ROOT / "requirements" / f"{name}.lock").read_text().strip()
    ):
        line, *hashes = entry.split(" \\\n")
        assert hashes, line
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", one) for one in hashes), line
        pin = re.fullmatch(r"([a-z0-9][a-z0-9.-]*)==(\S+)", line)
        assert pin is not None, line
        found[canonicalize_name(pin[1])] = Version(pin[2])
    return found


def wanted(kind: str) -> list[Requirement]:
    """By pyproject.toml and the files beside the lock files."""
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    texts = list(project["dependencies"])
    for extra in EXTRAS[kind]:
        texts += extras[extra]
    for name in ("image.in", f"torch-{kind}.in"):
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        texts += [text for line in lines if (text := line.partition("#")[0].strip())]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("kind", TORCH)
def test_the_locked_versions_are_those_that_the_project_allows(kind: str) -> None:
    locked = pins(kind)
    for one in wanted(kind):
        name = canonicalize_name(one.name)
        assert name in locked, f"{one}: run `make lock`"
        assert one.specifier.contains(locked[name]), f"{one}, not {locked[name]}: run `make lock`"
    assert str(locked["torch"]) == TORCH[kind]
    assert any(name.startswith("nvidia-") for name in locked) is (kind == "cuda")


def test_both_images_have_the_same_but_for_torch_and_what_vllm_bounds() -> None:
    cpu, cuda = pins("cpu"), pins("cuda")
    differ = {name for name, version in cpu.items() if cuda[name] != version}
    assert differ <= {"torch", "transformers", "numpy"}


def test_what_vllm_asks_for_is_overridden_by_what_the_project_asks_for() -> None:
    text = (ROOT / "requirements" / "vllm-override.in").read_text().partition("#")[0]
    assert text.strip() in PROJECT["project"]["optional-dependencies"]["cluster"]
    assert "--no-deps" in DEPENDENCIES, "pip would refuse the lock"


def test_a_version_that_the_project_refuses_would_show() -> None:
    assert not Requirement("torch>=2.11,<2.14").specifier.contains(Version("2.14.0+cpu"))
    with pytest.raises(AssertionError):
        assert all(one.specifier.contains(Version("0.0.1")) for one in wanted("cpu"))


def test_what_builds_the_wheel_is_locked_too() -> None:
    locked = pins("build")
    for text in PROJECT["build-system"]["requires"]:
        assert Requirement(text).specifier.contains(locked[Requirement(text).name])


def test_it_is_built_from_the_lock_files_alone() -> None:
    installs = re.findall(
        r"pip (?:--python \S+ )?install (.*?)(?:\n(?!  )|$)",
        (DEPENDENCIES + APPLICATION).replace("\\\n", " "),
        re.DOTALL,
    )
    assert len(installs) == 3
    for options in installs:
        assert "--require-hashes" in options or "--no-deps" in options
    for name in (ROOT / "requirements").iterdir():
        assert "://" not in name.read_text(), "where packages come from is each user's to say"
    urls = re.findall(r"\S+://\S+", DOCKERFILE)
    assert urls == ["TORCH_INDEX=https://download.pytorch.org/whl/cpu"], "PyPI has no such builds"


def test_it_has_all_packages_and_nothing_to_build_with() -> None:
    copied = set(re.findall(r"^COPY (\w+) \1$", APPLICATION, re.MULTILINE))
    packages = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    assert copied == {name.rstrip("*") for name in packages}
    assert [("g++" in stage) for stage in STAGES] == [False, True, False, False]
    (installed,) = re.findall(
        r"apt-get install -y --no-install-recommends (.*?) \\?\s*&&", IMAGE, re.DOTALL
    )
    always, on_gpus = installed.split("\\\n")
    assert always.split() == ["libgomp1", "wget"]
    assert on_gpus.strip() == '$([ "$TORCH" = cpu ] || echo gcc libc6-dev)'
    assert "pip" not in IMAGE
    assert re.findall(r"^COPY --from=(\w+) (\S+) (\S+)$", IMAGE, re.MULTILINE) == [
        ("dependencies", "/opt/kvrelay", "/opt/kvrelay"),
        ("kernels", "/opt/kernels", "/opt/kvrelay/kernels"),
        ("application", "/opt/application", "/opt/kvrelay"),
    ]


def test_it_runs_as_a_user_without_rights() -> None:
    assert re.findall(r"^USER (\S+)$", IMAGE, re.MULTILINE) == ["1000:1000"]
    assert "useradd --uid 1000 " in IMAGE
    assert "HOME=/tmp " in IMAGE


def test_its_labels_are_the_projects() -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', IMAGE))
    project = PROJECT["project"]
    assert labels == {
        "title": project["name"],
        "description": project["description"],
        "version": project["version"],
        "licenses": project["license"],
    }


def test_all_stages_have_one_base() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert set(bases) - {"dependencies"} == {bases[0]}


def test_what_it_copies_is_in_the_build_context() -> None:
    """.dockerignore leaves out everything that it does not name."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    named = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
        for source in line.replace("${TORCH}", "cpu").split()[:-1]
    }
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(
            PurePosixPath(parent).match(pattern)
            for pattern in named
            for parent in (source, *map(str, PurePosixPath(source).parents[:-1]))
        ), source


def test_kernels_are_compiled_from_their_sources_alone(tmp_path: Path) -> None:
    """The stage has none of the packages that kvrelay needs, and not all of kvrelay."""
    for source in re.findall(r"^COPY (\S+) ", KERNELS, re.MULTILINE):
        target = tmp_path / source
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target)
        else:
            target.parent.mkdir(parents=True)
            shutil.copy(ROOT / source, target)
    paths = [str(tmp_path), str(tmp_path / "scripts")]
    code = "import prebuild_kernels as it; print(*(path.is_dir() for path in it.SOURCES))"
    answer = subprocess.run(
        [sys.executable, "-S", "-I", "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.split() == ["True", "True"]


def test_it_has_what_pods_run_before_they_end() -> None:
    (script,) = re.findall(r"^COPY (k8s/\S+) /usr/local/bin/leave-node$", IMAGE, re.MULTILINE)
    assert (ROOT / script).stat().st_mode & 0o111
    assert "KVRELAY_KERNELS=/opt/kvrelay/kernels" in IMAGE
    assert "prebuild_kernels.py /opt/kernels" in KERNELS
