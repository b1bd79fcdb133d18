"""The grammars of one model, compiled and kept. Imports no torch."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from kvrelay.engine.sampling.grammar import COMPILER, SMALL, GrammarCompiler
from kvrelay.engine.sampling.grammar_time import CALL_S, TOKEN_S, GrammarTime, Spending, too_slow
from kvrelay.engine.sampling.grammar_trial import GrammarTrial
from kvrelay.engine.sampling.matcher import Compiled, Matcher
from kvrelay.errors import KvRelayError
from kvrelay.types.requests import Guidance

# Compiled grammars that are kept, and bytes of their sources. A compiled grammar takes up to 400
# times its source, and up to 20 MiB more for what it remembers.
MAX_COMPILED, MAX_SOURCES = 32, 2**18
# Tokens that the answers of one compiled grammar may have together. The next answer has it compiled
# again, so that what a grammar remembers stays within the limits of the library.
MOST_TOKENS = 2048


class Grammars:
    """The compiled grammars of one model. Safe to call from any thread."""

    def __init__(self, folder: str, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """`vocab_size`: width of the model's logits."""
        self._eos_token_ids = eos_token_ids
        self._compiler = GrammarCompiler(folder, vocab_size, eos_token_ids)
        self._trial = GrammarTrial(folder, vocab_size, eos_token_ids)
        # Compiled grammars at the beginning of an answer, by salt, the most recently used last.
        self._compiled: OrderedDict[tuple[str, Guidance], Compiled] = OrderedDict()
        # By tenant.
        self._allowances: defaultdict[str, GrammarTime] = defaultdict(GrammarTime)
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """Reads the vocabulary and compiles a grammar, so that no request waits for that. Blocks.
        If it fails, the requests with guidance show the reason.
        """
        with suppress(KvRelayError):
            self.open(SMALL, (), 0)

    def open(
        self,
        guidance: Guidance,
        token_ids: Sequence[int],
        prompt_len: int,
        salt: str = "",
        tenant: str = "",
        max_tokens: int = 1,
    ) -> Matcher:
        """Returns the matcher of a sequence with these tokens, whose answer has up to `max_tokens`.

        Blocks to compile guidance that was not used lately with this salt, which is that of the
        sequence's prefix cache: the time would tell one tenant whether another uses a schema.
        Guidance that the router has not tried out with the same compiler is tried out first.

        Raises InvalidArgument if the guidance is not accepted, if the tokens after the prompt do
        not follow it or take more than the tenant's time, and Unavailable if the trial does not
        run.
        """
        compiled = self._known(salt, guidance, max_tokens)
        if compiled is None:
            if guidance.tried_with != COMPILER:
                self._trial.check(guidance)
            compiled = Compiled(partial(self._compiler.compile, guidance))
            self._keep(salt, guidance, compiled)
        compiled.num_tokens += max_tokens
        width = -(-self._compiler.tokenizer.vocab_size // 32)
        with self._lock:
            allowance = self._allowances[tenant]
        matcher = Matcher(compiled, width, prompt_len, self._eos_token_ids, allowance)
        spent = Spending(allowance, CALL_S + TOKEN_S * (len(token_ids) - prompt_len))
        for end in range(prompt_len + 1, len(token_ids) + 1):
            began = time.thread_time()
            matcher.advance(token_ids, end)
            seconds = time.thread_time() - began
            if not spent.add(seconds):
                raise too_slow(seconds)
        return matcher

    def close(self) -> None:
        """Ends the process of the trial."""
        self._trial.close()

    def _known(self, salt: str, guidance: Guidance, max_tokens: int) -> Compiled | None:
        key = salt, guidance
        with self._lock:
            found = self._compiled.get(key)
            if found is None or found.num_tokens + max_tokens > MOST_TOKENS:
                return None
            self._compiled.move_to_end(key)
            return found

    def _keep(self, salt: str, guidance: Guidance, compiled: Compiled) -> None:
        key = salt, guidance
        with self._lock:
            self._compiled[key] = compiled
            self._compiled.move_to_end(key)
            sources = sum(len(one.source.encode()) for _, one in self._compiled)
            while len(self._compiled) > MAX_COMPILED or sources > MAX_SOURCES:
                (_, oldest), _ = self._compiled.popitem(last=False)
                sources -= len(oldest.source.encode())
