"""The grammars of one model, compiled and kept. Imports no torch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

from llguidance import LLMatcher

from kvrelay.engine.sampling.grammar import COMPILER, SMALL, GrammarCompiler
from kvrelay.engine.sampling.grammar_trial import GrammarTrial
from kvrelay.engine.sampling.matcher import Matcher
from kvrelay.errors import KvRelayError
from kvrelay.types.requests import Guidance

# Bytes of the compiled grammars' sources. A compiled grammar takes up to 400 times its source.
MAX_COMPILED = 2**18


class Grammars:
    """The compiled grammars of one model. Safe to call from any thread."""

    def __init__(self, folder: str, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """`vocab_size`: width of the model's logits."""
        self._eos_token_ids = eos_token_ids
        self._compiler = GrammarCompiler(folder, vocab_size, eos_token_ids)
        self._trial = GrammarTrial(folder, vocab_size, eos_token_ids)
        # Compiled grammars at the beginning of an answer, by salt, the most recently used last.
        self._compiled: OrderedDict[tuple[str, Guidance], LLMatcher] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """Reads the vocabulary and compiles a grammar, so that no request waits for that. Blocks.
        If it fails, the requests with guidance show the reason.
        """
        with suppress(KvRelayError):
            self.open(SMALL, (), 0, "")

    def open(
        self, guidance: Guidance, token_ids: Sequence[int], prompt_len: int, salt: str
    ) -> Matcher:
        """Returns the matcher of a sequence with these tokens. Blocks to compile guidance that was
        not used lately with this salt, which is that of the sequence's prefix cache: the time would
        tell one tenant whether another uses a schema. Guidance that the router has not tried out
        with the same compiler is tried out first.

        Raises InvalidArgument if the guidance is not accepted or the tokens after the prompt do not
        follow it, and Unavailable if the trial does not run.
        """
        compiled = self._known(salt, guidance)
        if compiled is None:
            if guidance.tried_with != COMPILER:
                self._trial.check(guidance)
            compiled = self._compiler.compile(guidance)
            self._keep(salt, guidance, compiled)
        width = -(-self._compiler.tokenizer.vocab_size // 32)
        matcher = Matcher(compiled.deep_copy(), width, prompt_len, self._eos_token_ids)
        matcher.advance(token_ids)
        return matcher

    def close(self) -> None:
        """Ends the process of the trial."""
        self._trial.close()

    def _known(self, salt: str, guidance: Guidance) -> LLMatcher | None:
        key = salt, guidance
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
            return self._compiled.get(key)

    def _keep(self, salt: str, guidance: Guidance, compiled: LLMatcher) -> None:
        key = salt, guidance
        with self._lock:
            if key not in self._compiled:
                self._bytes += len(guidance.source)
            self._compiled[key] = compiled
            while self._bytes > MAX_COMPILED:
                (_, oldest), _ = self._compiled.popitem(last=False)
                self._bytes -= len(oldest.source)
