"""Many seeds of the control plane alone, or one of them told.

python tests/simulation/run_control.py --seeds 100000
python tests/simulation/run_control.py --seeds 5000 --fleet
python tests/simulation/run_control.py --seed 17 --fleet --trace
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import structlog

# The packages that folders of tests are named after
sys.path[0] = str(Path(__file__).resolve().parents[2])
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simulation.control import ControlResult, ControlSimulation  # noqa: E402

SHOWN = 20  # failures, with what was complained of
EVERY = 1000  # seeds; then a line says how far it is


def run_seed(seed: int, fleet: bool) -> ControlResult:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    return ControlSimulation(seed, fleet=fleet).run()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--fleet", action="store_true", help="with workers, actuators and autoscalers"
    )
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--trace", action="store_true", help="tell its history")
    options = parser.parse_args()
    if options.seed is not None and options.trace:
        result = ControlSimulation(options.seed, fleet=options.fleet, history=print).run()
        print(*result.complaints, dict(result.faults), dict(result.acts), sep="\n")
        return bool(result.complaints)
    first, count = (options.first, options.seeds) if options.seed is None else (options.seed, 1)
    began, failed = time.monotonic(), []
    faults, acts, changes = Counter[str](), Counter[str](), 0
    gc.collect()
    gc.freeze()  # what was imported is never looked at again
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        results = pool.imap_unordered(
            partial(run_seed, fleet=options.fleet), range(first, first + count), chunksize=8
        )
        for done, result in enumerate(results, 1):
            faults += Counter(dict.fromkeys(result.faults, 1))
            acts += result.acts
            changes += result.leaders - 1
            if result.complaints:
                failed.append(result.seed)
                if len(failed) <= SHOWN:
                    print(
                        f"seed {result.seed} FAILED: " + "; ".join(result.complaints)[:600],
                        flush=True,
                    )
            if done % EVERY == 0:
                print(
                    f"{done} seeds in {time.monotonic() - began:.0f} s, {len(failed)} failed",
                    flush=True,
                )
    print(
        f"{count} seeds in {time.monotonic() - began:.0f} s; {changes} changes of the leader; "
        f"{dict(acts)}"
    )
    for name, number in sorted(faults.items()):
        print(f"  {number:8} {name}")
    if failed:
        print(f"FAILED: {len(failed)} seeds: {sorted(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
