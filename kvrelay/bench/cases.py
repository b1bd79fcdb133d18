"""The cases that the engine benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.bench.cost import ModelCost, Work
from kvrelay.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """A prompt with no cached prefix, measured up to its first token."""

    tokens: int

    def work(self, cost: ModelCost, chunk_tokens: int, weights: str) -> Work:
        """Returns the FLOPs and bytes of the whole prefill."""
        return cost.prefill(self.tokens, chunk_tokens, weights)


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One decode step of a batch of sequences, each with `context` tokens before the step."""

    batch: int
    context: int

    @property
    def tokens(self) -> int:
        """Number of tokens that one step generates."""
        return self.batch

    def work(self, cost: ModelCost, chunk_tokens: int, weights: str) -> Work:
        """Returns the FLOPs and bytes of one decode step."""
        return cost.decode(self.batch, self.context, weights)


@dataclass(frozen=True, slots=True)
class Cases:
    """The prefill and decode cases of one benchmark."""

    prefill: tuple[PrefillCase, ...]
    decode: tuple[DecodeCase, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, without the few tokens that are generated during a
        measurement.
        """
        return max(
            [*(case.tokens for case in self.prefill), *(case.context for case in self.decode)]
        )

    @property
    def most_batch(self) -> int:
        """The largest batch of all decode cases, in sequences."""
        return max(case.batch for case in self.decode)

    @property
    def most_tokens(self) -> int:
        """The most tokens that one case holds in the KV cache at once."""
        return max(self.longest, *(case.batch * case.context for case in self.decode))


def all_cases() -> Cases:
    """Returns the cases of a full benchmark."""
    return _cases((128, 512, 1024, 2048, 4096), (1, 4, 16, 32), (128, 1024))


def quick_cases() -> Cases:
    """Returns the cases of a quick benchmark."""
    return _cases((128, 512), (1, 4, 16), (128,))


def _cases(prompts: tuple[int, ...], batches: tuple[int, ...], contexts: tuple[int, ...]) -> Cases:
    return Cases(
        tuple(PrefillCase(tokens) for tokens in prompts),
        tuple(DecodeCase(batch, context) for context in contexts for batch in batches),
    )


def that_fit(cases: Cases, longest: int) -> Cases:
    """Returns the cases whose sequences have at most `longest` tokens. Raises InvalidArgument if no
    prefill case or no decode case is left.
    """
    fit = Cases(
        tuple(case for case in cases.prefill if case.tokens <= longest),
        tuple(case for case in cases.decode if case.context <= longest),
    )
    if not (fit.prefill and fit.decode):
        raise InvalidArgument(
            f"the model allows {longest} tokens, fewer than any case needs; choose a model "
            "with a longer context"
        )
    return fit
