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
# Times that a slow grammar is tried.
_ATTEMPTS = 2


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
        _answer(partial(_try, compiler, Guidance(**json.loads(line)), eos_token_ids))


def _answer(work: Callable[[], object]) -> None:
    """Writes why `work` fails, or nothing."""
    try:
        work()
        reason = ""
    except InvalidArgument as error:
        reason = error.message
    print(json.dumps(reason), flush=True)


def _try(compiler: GrammarCompiler, guidance: Guidance, eos_token_ids: frozenset[int]) -> None:
    """Raises InvalidArgument if the grammar fails, or is slow in every attempt: on a busy machine,
    a single token can take several times its usual processor time.
    """
    for _ in range(_ATTEMPTS):
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
        slowest = _follow(compiler, guidance, eos_token_ids)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if slowest <= SLOW_MASK_S:
            return
    raise refusal(
        f"it takes {slowest * 1000:.0f} ms for one token, and {SLOW_MASK_S * 1000:g} ms are "
        "allowed; use shorter patterns and constants"
    )


def _follow(compiler: GrammarCompiler, guidance: Guidance, eos_token_ids: frozenset[int]) -> float:
    """Compiles the grammar and follows it for some random tokens. Returns the processor time of the
    slowest one in seconds. Raises InvalidArgument if the grammar fails.
    """
    matcher = compiler.compile(guidance)
    chosen = random.Random(0)
    slowest = 0.0
    for _ in range(_WALKS):
        state = matcher.deep_copy()
        for _ in range(_TOKENS):
            began = time.process_time()
            mask = np.frombuffer(state.compute_bitmask(), np.uint8)
            slowest = max(slowest, time.process_time() - began)
            if state.is_error():
                raise refusal(state.get_error())
            if slowest > SLOW_MASK_S:
                return slowest
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            token = int(chosen.choice(allowed)) if len(allowed) else -1
            if token in eos_token_ids:
                break
            if not state.try_consume_tokens([token]):
                if state.is_error():
                    raise refusal(state.get_error())
                break
    return slowest


if __name__ == "__main__":
    main()
