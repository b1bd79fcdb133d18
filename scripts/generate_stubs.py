"""Generates the gRPC stubs in kvrelay/v1 from proto/. `make proto` runs it."""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(output_root: Path) -> None:
    """Writes OUTPUT_ROOT/kvrelay/v1/*_pb2{,_grpc}.py{,i}. Raises RuntimeError if protoc fails."""
    protos = sorted(
        str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto")
    )
    include = str(files("grpc_tools") / "_proto")
    out = str(output_root)
    flags = [
        f"-I{ROOT / 'proto'}",
        f"-I{include}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
    ]
    if protoc.main(["protoc", *flags, *protos]) != 0:
        raise RuntimeError("protoc failed; its message is above")
    (output_root / "kvrelay" / "v1" / "__init__.py").write_text(
        '"""Generated from proto/kvrelay/v1 by scripts/generate_stubs.py. Never edited."""\n'
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "output_root",
        type=Path,
        nargs="?",
        default=ROOT,
        metavar="OUTPUT_ROOT",
        help="Folder to write kvrelay/v1 to. Default: this repository.",
    )
    generate(parser.parse_args().output_root)
