"""Nothing of ours unpickles, evaluates or imports what it was sent. Ray does, by design, behind
`kvrelay.launch`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "kvrelay",
    "kv_transfer",
    "prefill_worker",
    "decode_worker",
    "router",
    "autoscaler",
    "scripts",
    "benchmarks",
)
MODULES = {
    *(
        "pickle",
        "_pickle",
        "cPickle",
        "pickletools",
        "marshal",
        "shelve",
        "dill",
        "cloudpickle",
        "joblib",
        "jsonpickle",
    ),
    *("multiprocessing", "xmlrpc", "code", "codeop", "imp"),
}
CALLS = {
    *("unsafe_load", "full_load", "UnsafeLoader", "FullLoader"),
    # torch.distributed's collectives of objects, and what else sends pickles
    *(
        "send_object_list",
        "recv_object_list",
        "broadcast_object_list",
        "scatter_object_list",
        "gather_object",
    ),
    *(
        "all_gather_object",
        "send_pyobj",
        "recv_pyobj",
        "rpc_sync",
        "rpc_async",
        "read_pickle",
        "to_pickle",
    ),
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
KEYWORDS = {("allow_pickle", True), ("weights_only", False), ("trust_remote_code", True)}
OF_MODULES = {
    ("torch", "load"),
    ("torch", "save"),
    ("yaml", "load"),
    ("yaml", "load_all"),
    ("np", "load"),
    ("numpy", "load"),
}


def found_in(source: str) -> Iterator[str]:
    """What stands in a module that could run what it reads."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                yield from (one.name for one in names if one.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in MODULES:
                    yield module
                yield from (
                    one.name
                    for one in names
                    if one.name in CALLS or (module, one.name) in OF_MODULES
                )
            case ast.Attribute(value=ast.Name(id=module), attr=name) if (
                module,
                name,
            ) in OF_MODULES:
                yield f"{module}.{name}"
            case ast.Attribute(attr=name) if name in CALLS:
                yield name
            case ast.Name(id=name) if name in CALLS | BUILTINS:
                yield name
            case ast.keyword(arg=str(name), value=ast.Constant(value)) if (name, value) in KEYWORDS:
                yield f"{name}={value}"


def test_nothing_unpickles() -> None:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 150
    found = {
        (str(file.relative_to(ROOT)), what) for file in files for what in found_in(file.read_text())
    }
    assert not found, found


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "pickle"),
        ("import os, marshal", "marshal"),
        ("from cloudpickle import loads", "cloudpickle"),
        ("import multiprocessing.connection", "multiprocessing.connection"),
        ("torch.load(path)", "torch.load"),
        ("from torch import load", "load"),
        ("torch.distributed.recv_object_list(x)", "recv_object_list"),
        ("from torch.distributed import gather_object as g", "gather_object"),
        ("np.load(file, allow_pickle=True)", "allow_pickle=True"),
        ("AutoModel.from_pretrained(path, trust_remote_code=True)", "trust_remote_code=True"),
        ("yaml.load(text, yaml.UnsafeLoader)", "UnsafeLoader"),
        ("def f(text):\n    return eval(text)", "eval"),
    ],
)
def test_the_search_would_find_it(source: str, what: str) -> None:
    assert what in set(found_in(source))
