"""The child process of GrammarTrial: `python -m kvrelay.engine.sampling.grammar_process FOLDER
VOCAB_SIZE EOS,EOS`.

Reads guidance from stdin, one JSON object a line, and answers each with a line: why the guidance is
not accepted, or nothing. The first line says whether the model can follow guidance at all.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvrelay.engine.sampling.grammar import CPU_S, SLOW_MASK_S, GrammarCompiler, refusal
from kvrelay.errors import InvalidArgument
from kvrelay.types.requests import Guidance

# Memory for all grammars of the process.
MEMORY = 2**30
# Random answers that are tried, and tokens of each.
_WALKS, _TOKENS = 3, 24


def main() -> None:
    """Serves until stdin ends."""
    folder, vocab_size, eos = sys.argv[1:]
    eos_token_ids = frozenset(map(int, filter(None, eos.split(","))))
    compiler = GrammarCompiler(folder, int(vocab_size), eos_token_ids)
    _answer(lambda: compiler.tokenizer)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
        _answer(partial(_try, compiler, Guidance(**json.loads(line)), eos_token_ids))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _answer(work: Callable[[], object]) -> None:
    """Writes why `work` fails, or nothing."""
    try:
        work()
        reason = ""
    except InvalidArgument as error:
        reason = error.message
    print(json.dumps(reason), flush=True)


def _try(compiler: GrammarCompiler, guidance: Guidance, eos_token_ids: frozenset[int]) -> None:
    """Compiles the grammar and follows it for some random tokens. Raises InvalidArgument if it
    fails or is slow.
    """
    matcher = compiler.compile(guidance)
    chosen = random.Random(0)
    for _ in range(_WALKS):
        state = matcher.deep_copy()
        for _ in range(_TOKENS):
            began = time.process_time()
            mask = np.frombuffer(state.compute_bitmask(), np.uint8)
            seconds = time.process_time() - began
            if state.is_error():
                raise refusal(state.get_error())
            if seconds > SLOW_MASK_S:
                raise refusal(
                    f"it takes {seconds * 1000:.0f} ms for one token, and {SLOW_MASK_S * 1000:g} "
                    "ms are allowed; use shorter patterns and constants"
                )
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            token = int(chosen.choice(allowed)) if len(allowed) else -1
            if token in eos_token_ids:
                break
            if not state.try_consume_tokens([token]):
                if state.is_error():
                    raise refusal(state.get_error())
                break


if __name__ == "__main__":
    main()
