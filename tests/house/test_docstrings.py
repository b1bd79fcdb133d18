"""Every public module, class and function of the packages has a docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from support.source import PACKAGES, ROOT

Named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public(tree: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, Named]]:
    """Yields the public classes and functions of a module, and the public members of its classes.
    The interface of a base class documents its overrides.
    """
    for node in tree.body:
        if not isinstance(node, Named) or node.name.startswith("_"):
            continue
        decorators = {ast.unparse(one) for one in node.decorator_list}
        if decorators & {"override", "overload"} or any(
            one.endswith(".setter") for one in decorators
        ):
            continue
        yield f"{prefix}.{node.name}", node
        if isinstance(node, ast.ClassDef):
            yield from public(node, f"{prefix}.{node.name}")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_docstring(package: str) -> None:
    missing = []
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if name.startswith("kvrelay.v1"):
            continue
        tree = ast.parse(path.read_text())
        if tree.body and ast.get_docstring(tree) is None:
            missing.append(name)
        missing += [where for where, node in public(tree, name) if not ast.get_docstring(node)]
    assert not missing, f"{len(missing)} public names without a docstring: {', '.join(missing)}"
