"""Records how the attention class of each release of flashinfer may be called, for a test that
binds the engine's calls to it. flashinfer itself cannot be imported without a GPU's libraries.

pip download --no-deps flashinfer-python==VERSION -d WHEELS   # for each release
python scripts/record_flashinfer_signatures.py WHEELS
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path

CLASS = "BatchPrefillWithPagedKVCacheWrapper"
METHODS = ("__init__", "plan", "run")
TARGET = Path(__file__).parents[1] / "tests/unit/engine/attention/flashinfer_signatures.json"


def signatures(source: str) -> dict[str, str]:
    """The parameters of each method, without annotations. Of overloads, the last is real."""
    (found,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == CLASS
    )
    return {
        node.name: ast.unparse(_bare(node.args))
        for node in found.body
        if isinstance(node, ast.FunctionDef) and node.name in METHODS
    }


def _bare(arguments: ast.arguments) -> ast.arguments:
    for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        one.annotation = None
    for each in (arguments.vararg, arguments.kwarg):
        if each is not None:
            each.annotation = None
    return arguments


def main() -> None:
    """Writes TARGET: each distinct set of signatures and the releases that have it."""
    groups: dict[str, list[str]] = {}
    for wheel in sorted(Path(sys.argv[1]).rglob("flashinfer_python-*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            source = archive.read("flashinfer/prefill.py").decode()
        version = wheel.name.split("-")[1]
        groups.setdefault(json.dumps(signatures(source)), []).append(version)
    recorded = [
        {"releases": releases, "methods": json.loads(methods)}
        for methods, releases in groups.items()
    ]
    TARGET.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
