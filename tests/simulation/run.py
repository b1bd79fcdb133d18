"""Many seeds, or one of them told.

python tests/simulation/run.py --seeds 10000
python tests/simulation/run.py --seed 17 --trace
python tests/simulation/run.py --seeds 1000 --hash-bits 128
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

from rich.progress import track

# The packages that folders of tests are named after
sys.path[0] = str(Path(__file__).resolve().parents[2])
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simulation.simulation import HASH_BITS, Result, Simulation  # noqa: E402

SHOWN = 20  # failures, with what was complained of
COLLECT_EVERY = 20  # seeds; a collection in mid-history would end what a history left behind


def run_seed(seed: int, hash_bits: int = HASH_BITS) -> Result:
    """What a seed that cannot even be run to its end fails of is a complaint, too."""
    try:
        return Simulation(seed, hash_bits=hash_bits).run()
    except Exception as error:  # noqa: BLE001  it is told with its seed
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"the simulation broke off: {error!r} at {Path(where.filename).name}:{where.lineno}"
        return Result(seed, "", (text,), Counter(), Counter(), 0, 0.0, 0.0)
    finally:
        if seed % COLLECT_EVERY == 0:
            gc.collect()


def tell(seed: int, hash_bits: int) -> int:
    result = Simulation(seed, print, hash_bits=hash_bits).run()
    for complaint in result.complaints:
        print("COMPLAINT", complaint)
    print(f"trace {result.trace}; {dict(result.outcomes)}; {dict(result.faults)}")
    return bool(result.complaints)


def run_many(seeds: range, processes: int, hash_bits: int) -> int:
    faults: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    failed: list[int] = []
    began, virtual_s, settled = time.monotonic(), 0.0, 0.0
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        results = pool.imap_unordered(partial(run_seed, hash_bits=hash_bits), seeds, chunksize=4)
        for result in track(results, "seeds", len(seeds)):
            faults += Counter(dict.fromkeys(result.faults, 1))
            outcomes += result.outcomes
            virtual_s += result.virtual_s
            settled = max(settled, result.settled_s)
            if result.complaints:
                failed.append(result.seed)
                if len(failed) <= SHOWN:
                    print(
                        f"seed {result.seed} FAILED: " + "; ".join(result.complaints)[:600],
                        flush=True,
                    )
    print(
        f"{len(seeds)} seeds in {time.monotonic() - began:.0f} s, {virtual_s / 3600:.1f} hours "
        f"of virtual time"
    )
    print(f"blocks were back at most {settled:.1f} s after the last answer")
    for title, counts in (("seeds with the fault", faults), ("requests that ended", outcomes)):
        print(title)
        for name, count in sorted(counts.items()):
            print(f"  {count:8} {name}")
    if failed:
        print(f"FAILED: {len(failed)} seeds: {sorted(failed)}")
        print(f"told: python tests/simulation/run.py --seed {min(failed)} --trace")
    return bool(failed)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--trace", action="store_true", help="tell its history")
    bits = "of block hashes; 16 make collisions, 128 are production's"
    parser.add_argument(
        "--hash-bits", type=int, choices=range(8, 129, 8), default=HASH_BITS, help=bits
    )
    options = parser.parse_args()
    if options.seed is not None and options.trace:
        return tell(options.seed, options.hash_bits)
    first, count = (options.first, options.seeds) if options.seed is None else (options.seed, 1)
    gc.collect()
    gc.freeze()  # what was imported is never looked at again
    gc.disable()
    return run_many(range(first, first + count), options.processes, options.hash_bits)


if __name__ == "__main__":
    sys.exit(main())
