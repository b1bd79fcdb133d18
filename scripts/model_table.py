"""Writes docs/models.md: the causal language models of transformers that kvrelay serves, and the
reasons for the other models.

.venv/bin/python scripts/model_table.py [--jobs 2] [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import transformers
from model_sweep import MODEL_TYPES, Verdict, sweep
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
_VERSION = re.compile(r"transformers (\S+)\. It")
_ROW = re.compile(r"^\| `(?P<types>[^|`]+)` \| (?P<kind>\w+) \|(?: (?P<reason>.+) \|)?$")
_HEAD = """\
# Models

Do not edit: `scripts/model_table.py` generated this page with transformers {version}. It tries
every causal language model class of transformers.

The script saves each class with a small random configuration as a checkpoint and loads it as a
worker and as a router do. A *served* class gives the tokens of transformers' `generate` (greedy,
float32) for prompts of several lengths, in one batch, whole and in chunks, on torch's operators
and on the native kernels, and after a failover. A *refused* class ends `kvrelay serve` with the
reason below. A worker that loads a model checks it on a few tokens with its own configuration and
weights, so a checkpoint may be refused although its class is listed as served.
"""


def verdicts(model_types: Sequence[str], jobs: int) -> list[Verdict]:
    """Checks the classes in several processes, each with a part of them, to bound the memory."""
    parts = [model_types[i : i + 24] for i in range(0, len(model_types), 24)]
    with ThreadPoolExecutor(jobs) as pool:
        return [one for part in pool.map(_in_a_process, parts) for one in part]


def _in_a_process(model_types: Sequence[str]) -> list[Verdict]:
    done = subprocess.run(
        [sys.executable, __file__, "--part", *model_types],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [Verdict(*json.loads(line)) for line in done.stdout.splitlines()]


def _print_part(model_types: Sequence[str]) -> None:
    set_verbosity_error()
    disable_progress_bar()
    told = [json.dumps([one.model_type, one.result, one.reason]) for one in sweep(model_types)]
    print("\n".join(told))


def page(found: Iterable[Verdict]) -> str:
    """Returns the text of the page."""
    rows: dict[str, dict[tuple[str, str], list[str]]] = {
        "served": defaultdict(list),
        "refused": defaultdict(list),
    }
    for one in found:
        rows[one.result][MODEL_TYPES[one.model_type], one.reason].append(one.model_type)
    served, refused = rows["served"], rows["refused"]
    lines = [_HEAD.format(version=transformers.__version__)]
    lines += [f"## Served: {len(served)} classes\n", "| model_type | class |", "|---|---|"]
    lines += [f"| `{', '.join(types)}` | {kind} |" for (kind, _), types in sorted(served.items())]
    lines += [
        f"\n## Refused: {len({kind for kind, _ in refused})} classes\n",
        "| model_type | class | reason |",
    ]
    lines += ["|---|---|---|"]
    lines += [
        f"| `{', '.join(types)}` | {kind} | {reason} |"
        for (kind, reason), types in sorted(refused.items())
    ]
    return "\n".join(lines) + "\n"


def table(text: str) -> tuple[str, list[Verdict]]:
    """Parses a page. Returns the version of transformers and the verdict of each model type."""
    version = _VERSION.search(text)
    found = []
    for line in text.splitlines():
        if row := _ROW.match(line):
            reason = row["reason"] or ""
            result = "refused" if reason else "served"
            found += [
                Verdict(model_type, result, reason) for model_type in row["types"].split(", ")
            ]
    return version[1] if version else "", found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="Number of processes.")
    parser.add_argument(
        "--check", action="store_true", help="Check that the page is current; write nothing."
    )
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        _print_part(options.part)
        return
    found = verdicts(list(MODEL_TYPES), options.jobs)
    bugs = [f"{one.model_type}: {one.reason}" for one in found if one.result == "bug"]
    if bugs:
        sys.exit("\n".join(bugs))
    text = page(found)
    if not options.check:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        sys.exit(f"{PAGE} is not current; run scripts/model_table.py")


if __name__ == "__main__":
    main()
