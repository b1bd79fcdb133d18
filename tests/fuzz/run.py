"""Feeds spoiled inputs to everything that reads what comes from outside: `make fuzz`.

    python tests/fuzz/run.py [PARSER ...] [--seconds N] [--seed N]

Each parser runs in a process of its own, one after the other, and is watched: an input that takes
too long, ends the process or takes more memory than its size warrants is a finding, as is any error
that is not a typed one. A finding's input is saved in fuzz-findings/, and its seed printed;
`--seed` runs that one again. Exit code 1 if there was one.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# The packages that folders of tests are named after
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.catalogue import NAMES, parser
from fuzz.parser import Finding, fuzz

HANG_CPU_S = 20.0  # of processor time for one input
HANG_S = 300.0  # of any, on a busy machine
MEMORY_BYTES = 16 * 2**30  # of address space, where an input that takes all has to end
FINDINGS = Path("fuzz-findings")
_NUMBER = struct.Struct("q")


class Progress:
    """The seed of the input that is being fed, told to another process through a file; 0 while
    there is none.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _NUMBER.size)

    def tell(self, seed: int) -> None:
        self._memory[:] = _NUMBER.pack(seed)

    def last(self) -> int:
        seed: int = _NUMBER.unpack(self._memory)[0]
        return seed


def seeds(first: int, seconds: float) -> Iterator[int]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield first
        first += 1


def work(name: str, first: int, seconds: float, path: Path) -> int:
    """In the process that is watched."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    progress = Progress(path)
    try:
        print(
            fuzz(parser(name), seeds(first, seconds) if seconds else [first], progress.tell),
            flush=True,
        )
    except Finding as error:
        if error.__cause__ is not None:
            sys.excepthook(type(error.__cause__), error.__cause__, error.__cause__.__traceback__)
        print(f"FINDING {error}", flush=True)
        return 1
    progress.tell(0)
    return 0


def watch(name: str, first: int, seconds: float) -> bool:
    """Whether all is well. Saves the input that it was not well with."""
    print(f"{name}: ", end="", flush=True)
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(_NUMBER.size))
        file.flush()
        words = [sys.executable, __file__, name, "--seconds", str(seconds), "--seed", str(first)]
        child = subprocess.Popen(
            [*words, "--progress", file.name], env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        progress = Progress(Path(file.name))
        why = ""
        # Which input, and the child's and this clock when it came
        since = (0, 0.0, time.monotonic())
        while child.poll() is None:
            now = progress.last(), _cpu_seconds(child.pid), time.monotonic()
            if now[0] != since[0]:
                since = now
            if since[0] and (now[1] - since[1] > HANG_CPU_S or now[2] - since[2] > HANG_S):
                why = (
                    f"hangs: {now[1] - since[1]:.0f} s of processor time, {now[2] - since[2]:.0f} "
                    f"s in all"
                )
                child.kill()
                child.wait()
                break
            time.sleep(0.2)
        seed = progress.last()
    if child.returncode == 0:
        return True
    FINDINGS.mkdir(exist_ok=True)
    saved = FINDINGS / f"{name}-{seed}"
    saved.write_bytes(parser(name).input(seed))
    print(
        f"{name}: seed {seed} {why or f'ended the process with {child.returncode}'}; saved as "
        f"{saved}"
    )
    print(f"    python tests/fuzz/run.py {name} --seed {seed} --seconds 0")
    return False


def _cpu_seconds(pid: int) -> float:
    """That a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("parsers", nargs="*", metavar="PARSER", help=", ".join(NAMES))
    options.add_argument("--seconds", type=float, default=60.0, help="for each; 0 is one input")
    options.add_argument(
        "--seed", type=int, help="of the first input, from 1 on; random if not given"
    )
    options.add_argument("--progress", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if unknown := set(given.parsers) - set(NAMES):
        options.error(f"{', '.join(unknown)} is not one of {', '.join(NAMES)}")
    first = given.seed or random.randrange(1, 2**40)
    if given.progress is not None:
        return work(given.parsers[0], first, given.seconds, given.progress)
    well = [watch(one, first, given.seconds) for one in given.parsers or NAMES]
    return 0 if all(well) else 1


if __name__ == "__main__":
    raise SystemExit(main())
