from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "generate_stubs.py", tmp_path], check=True)
    generated = {path.name: path.read_text() for path in (tmp_path / "kvrelay" / "v1").iterdir()}
    kept = {
        path.name: path.read_text()
        for path in (ROOT / "kvrelay" / "v1").iterdir()
        if path.is_file()
    }
    assert generated == kept, "run `make proto`"
