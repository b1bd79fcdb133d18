"""Values of a request: sampling, sequence, usage and ledger. Frozen, slotted, without I/O."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Path = Literal["disaggregated", "local"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
GuidanceKind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True, slots=True)
class Guidance:
    """A grammar that the answer follows: a JSON schema, a regular expression of the whole answer,
    or a grammar in llguidance's variant of Lark.
    """

    kind: GuidanceKind
    source: str
    # The compiler with which the router has tried it out, and its version; empty: with none.
    tried_with: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """The tokens around the thinking in an answer."""

    # None if the prompt ends inside the thinking.
    begin: int | None
    end: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled. `router.frontend.validation` validates the values; this class does
    not.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. The sample at absolute position p
    of a sequence depends only on (seed, p) and the logits. `logprobs` None: none; N >= 0: the
    sampled token and the N most likely tokens. `prompt_logprobs`: the same for the prompt's tokens.
    `thinking_token_budget`: most tokens between the markers of `thinking`; then the end marker
    follows.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    guidance: Guidance | None = None
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    # Set by the router for an answer with a budget.
    thinking: ThinkingMarkers | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probability of the sampled token, and (token id, logprob) of the most likely
    tokens.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Natural-log probabilities of a prompt's P tokens, from the second one on, each given the
    tokens before it. Arrays, because a prompt may have many thousands.
    """

    # float32 [P - 1]
    logprobs: array[float]
    # int32 and float32 [(P - 1) x N]: the N most likely tokens at each place, most likely first.
    top_ids: array[int]
    top_logprobs: array[float]

    def __len__(self) -> int:
        return len(self.logprobs)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        count = len(self.top_ids) // max(1, len(self.logprobs))
        for place, logprob in enumerate(self.logprobs):
            part = slice(place * count, (place + 1) * count)
            pairs = zip(self.top_ids[part], self.top_logprobs[part], strict=True)
            yield TokenLogprobs(logprob, tuple(pairs))


@dataclass(frozen=True, slots=True)
class Slo:
    """Latencies that a request asks for, in milliseconds. Only values larger than the cluster's
    count.
    """

    # Time to first token.
    ttft_ms: float | None = None
    # Time between two tokens.
    itl_ms: float | None = None


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """The complete state of a sequence to run. Any worker of the pool can continue it."""

    request_id: str
    attempt: int
    # The prompt, then the tokens that earlier attempts emitted.
    token_ids: tuple[int, ...]
    prompt_len: int
    # The seed is set.
    sampling: SamplingParams
    salt: str = ""
    priority: int = 0
    # Time left when the spec was sent. A duration, because the clocks of machines may differ.
    deadline_s: float | None = None
    # The tenant to which the cached blocks of this sequence are charged.
    tenant: str = ""
    # Weight of the tenant: its share of the worker relative to other tenants.
    weight: float = 1.0
    # Seconds between two tokens that its client asks for; None: as configured.
    itl_s: float | None = None
    # Hash of the files of the adapter; empty for the base model.
    adapter: str = ""

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the attempt: (request id, attempt)."""
        return self.request_id, self.attempt

    @property
    def num_emitted(self) -> int:
        """Number of tokens that earlier attempts emitted."""
        return len(self.token_ids) - self.prompt_len


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached_tokens` are part of the prompt tokens, and
    `reasoning_tokens`, without the markers around the thinking, of the completion tokens.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Handoff:
    """One KV hand-off. bytes = blocks x block_bytes. The `cached_blocks` were not sent, because the
    receiver had them.
    """

    transport: str
    blocks: int
    block_bytes: int
    bytes: int
    cached_blocks: int
    # From the first frame to the acknowledged commit.
    seconds: float
    # From the end of the prefill's compute to the acknowledged commit.
    exposed_seconds: float
    # Why this transport was chosen.
    why: str = ""


@dataclass(frozen=True, slots=True)
class PrefillTimings:
    """The times and token counts of one prefill, measured by the worker."""

    # From the acceptance by the worker to the first chunk.
    queue_seconds: float
    # From the first chunk to the first token.
    compute_seconds: float
    # Tokens that needed no compute.
    cached_tokens: int
    chunks: int
    # Part of the cached tokens that came from another worker's prefix cache, or from a tier.
    fetched_tokens: int = 0
    # Part of queue_seconds.
    fetch_seconds: float = 0.0
    # The tier that the fetched tokens came from; empty for another worker.
    fetched_from: str = ""

    @property
    def fetch(self) -> Fetch | None:
        """The fetch of the prefix, if there was one."""
        if not self.fetched_tokens:
            return None
        return Fetch(self.fetched_from or "worker", self.fetched_tokens, self.fetch_seconds)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to serve a request: the workers, the reason for their choice, and the outcome."""

    path: Path
    why: str
    prefill_worker: str
    decode_worker: str
    outcome: str
    # Seconds by phase, from the end of the attempt before to the end of this one, or to its last
    # token. Empty if the request had one attempt: then the ledger's phases are its own.
    phases: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Fetch:
    """KV of a prompt that was fetched instead of computed."""

    # worker: another worker's prefix cache. host, disk: a tier of the worker itself.
    source: str
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the time of a request went, by the router's clock. The `phases` add up to
    `ttft_seconds`; a phase of several attempts is the sum of its parts. The phases of all
    `attempts` add up to the time from the arrival to the last token.
    """

    phases: tuple[tuple[str, float], ...] = ()
    ttft_seconds: float = 0.0
    second_token_gap_seconds: float = 0.0
    decode_seconds: float = 0.0
    e2e_seconds: float = 0.0
    handoff: Handoff | None = None
    attempts: tuple[Attempt, ...] = ()
    fetch: Fetch | None = None
    # Tokens that the last token did not attend to, since their KV was dropped (`kv.eviction`).
    dropped_tokens: int = 0
