"""Runs `kvrelay bench engine --json` on a machine that has torch and transformers, but lacks the
other dependencies of the command line.

python -m kvrelay.bench --device cuda --model-shape llama-3.1-8b
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from kvrelay.bench.run import Options, run
from kvrelay.errors import InvalidArgument, KvRelayError


def main() -> int:
    """Runs the benchmark and prints the report as JSON. Returns the exit code: 0 for success, 2 for
    an invalid argument, 1 for another error.
    """
    default = Options()
    parser = argparse.ArgumentParser(prog="python -m kvrelay.bench", description=__doc__)
    parser.add_argument("--model", default=default.model)
    parser.add_argument("--model-shape", dest="shape", metavar="NAME|DIR")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default.device)
    parser.add_argument("--weights", choices=("auto", "int8"), default=default.weights)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--chunk-tokens", type=int, default=default.chunk_tokens)
    parser.add_argument("--runs", type=int, default=default.runs)
    parser.add_argument("--peer", metavar="generate_batch|vllm=PYTHON")
    parser.add_argument("--quick", action="store_true")
    try:
        report = run(Options(**vars(parser.parse_args())), _progress)
    except KvRelayError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgument) else 1
    print(json.dumps(report.as_dict()))
    return 0


def _progress(what: str, total: int) -> Callable[[], None]:
    finished = 0

    def done() -> None:
        nonlocal finished
        finished += 1
        print(f"{what} {finished}/{total}", file=sys.stderr)

    return done


if __name__ == "__main__":
    sys.exit(main())
