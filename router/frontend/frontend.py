"""The frontend: turns client requests into streams by validation, tokenization and admission. Both
the gRPC and the HTTP endpoint use it.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator, Sequence
from dataclasses import replace

from kvrelay.clock import Clock
from kvrelay.config.model_sections import RouterConfig
from kvrelay.errors import DeadlineExceeded
from kvrelay.tenants import Tenant
from kvrelay.types.chat import WITHOUT_TOOLS, ChatOptions
from kvrelay.types.requests import FinishReason, SamplingParams
from kvrelay.wire.inference import GenerateRequest
from router.core.request import Request
from router.frontend.guidance_check import GuidanceCheck, tried
from router.frontend.model_card import ModelCard
from router.frontend.rate_limits import Limits
from router.frontend.tokenization import Text, TokenBound, replay
from router.frontend.validation import (
    adapter_of,
    admit_sampling,
    check_priority,
    check_request,
    limit_thinking,
    resumed_model,
)
from router.runtime.driver import Driver
from router.runtime.loop_slices import SLICE, LoopSlices
from router.runtime.stream import Stream, TokenSink

# Cost of an admission on the event loop, in the unit of LoopSlices.
ADMISSION_COST = SLICE // 2


class Frontend:
    """Turns client requests into streams."""

    def __init__(
        self,
        card: ModelCard,
        text: Text,
        driver: Driver,
        limits: Limits,
        config: RouterConfig,
        clock: Clock,
        slices: LoopSlices | None = None,
    ) -> None:
        self.card = card
        self.text = text
        self.limits = limits
        self.guidance = GuidanceCheck(card)
        self._driver = driver
        self._config = config
        self._clock = clock
        self._slices = slices or LoopSlices()

    @property
    def max_model_len(self) -> int:
        """Largest number of tokens of prompt and answer: the model's limit, or less if a worker
        holds less.
        """
        return min(
            self.card.info.max_model_len,
            *(one.max_model_len for one in self._driver.dispatcher.workers),
            2**31,
        )

    async def open(
        self,
        request: GenerateRequest,
        tenant: Tenant,
        arrival: float,
        time_left: float | None,
        traceparent: str = "",
    ) -> Stream:
        """Tokenizes and admits a request.

        `time_left` is the client's remaining time at `arrival`, in seconds; `traceparent` names the
        client's span. Raises DeadlineExceeded, and the errors of `tokenize` and `admit`.
        """
        if time_left is not None and time_left <= 0:
            raise DeadlineExceeded(
                "the deadline had already passed when the request arrived; send a later deadline"
            )
        token_ids = await self.tokenize(request, tenant)
        return await self.admit(request, token_ids, tenant, arrival, time_left, traceparent)

    def check_caller(self, tenant: Tenant) -> None:
        """Checks the tenant before the request's body is read. Raises the error with which any
        request of the tenant would be rejected now.
        """
        self.limits.check_request(tenant, self._clock.now())
        self._driver.check_open(
            tenant, -(2**31) if tenant.min_priority is None else tenant.min_priority
        )

    async def tokenize(
        self,
        request: GenerateRequest,
        tenant: Tenant,
        choices: int = 1,
        chat: ChatOptions = WITHOUT_TOOLS,
    ) -> tuple[int, ...]:
        """Validates a request with `choices` choices and returns its prompt's tokens. `chat`: of
        the messages.

        Raises InvalidArgument, NotFound, PermissionDenied for a priority that the tenant may not
        use, ResourceExhausted over the tenant's limit, and the errors of Driver.check_open.
        """
        check_request(request, self.card)
        check_priority(request.priority, tenant)
        self.limits.take_request(tenant, self._clock.now(), choices)
        # This check runs before the tokenization, which costs more than a rejection.
        self._driver.check_open(tenant, request.priority, choices)
        if request.sampling.guidance is not None:
            salt = tenant.salt_for(request.cache_salt)
            await self.guidance.check(request.sampling.guidance, tenant, salt)
        if request.token_ids:
            return request.token_ids
        bound = TokenBound.of_context(self.max_model_len)
        if request.messages:
            return await self.text.encode_chat(request.messages, tenant, bound, chat)
        assert request.prompt is not None, "check_request lets no request without a source pass"
        fewest = self.text.fewest_tokens(request.prompt)
        bound.check("prompt", fewest, "at least ")
        # The limit is charged before the tokenization. The charge remains if the request cannot be
        # served.
        self.limits.take_tokens(tenant, fewest, self._clock.now())
        token_ids = await self.text.encode(request.prompt, tenant=tenant, bound=bound)
        self.limits.give_back(tenant, fewest)
        return token_ids

    async def admit(
        self,
        request: GenerateRequest,
        token_ids: tuple[int, ...],
        tenant: Tenant,
        arrival: float,
        time_left: float | None,
        traceparent: str = "",
        markers: Sequence[str] = (),
    ) -> Stream:
        """Admits a request that `tokenize` has validated, or one that differs from it only in id
        and seed. `markers`: special tokens that appear in the answer's text.

        Raises InvalidArgument if the request does not fit into the context or exceeds the tenant's
        limit by itself, FailedPrecondition if it resumes tokens of another adapter, NotFound
        if its adapter is gone, ResourceExhausted if it exceeds the limit now, and the errors of
        Driver.submit.
        """
        timeout = self._config.default_deadline_s if time_left is None else time_left
        # The client also ends the call at its deadline, and would then get no reason. So the
        # router's deadline is slightly earlier.
        deadline = arrival + timeout - min(0.1, timeout / 10)
        request_id = request.request_id or uuid.uuid4().hex
        sampling = admit_sampling(
            request,
            request_id,
            len(token_ids),
            self.max_model_len,
            tenant,
            self.card.sampling_defaults,
        )
        thinking = self.text.thinking_markers(token_ids)
        sampling = tried(limit_thinking(sampling, tenant, thinking))
        admitted = Request(
            request_id=tenant.scoped(request_id),
            token_ids=token_ids,
            sampling=sampling,
            arrival=arrival,
            deadline=deadline,
            priority=request.priority,
            resume=request.resume,
            tenant=tenant,
            chat=bool(request.messages),
            model=resumed_model(request),
            traceparent=traceparent,
            cache_salt=request.cache_salt,
            slo=request.slo,
            open_ended=request.sampling.max_tokens is None,
            adapter=adapter_of(request, self.card),
            # An answer that follows a grammar does not think, so nothing of it is counted.
            thinking=thinking if sampling.guidance is None else None,
        )
        self.limits.take_tokens(tenant, admitted.most_tokens, self._clock.now())
        try:
            text = self.text.open_stream(sampling, token_ids, markers)
            if request.resume:
                await self._slices.run(tenant, replay(text, request.resume))
                complete = "stop" if text.stopped else self._completed(request.resume, sampling)
                admitted = replace(admitted, complete=complete)
        except BaseException:
            self.limits.give_back(tenant, admitted.most_tokens)
            raise
        return await self._submitted(admitted, text)

    async def _submitted(self, admitted: Request, text: TokenSink) -> Stream:
        """Submits a request when its tenant's turn comes: many requests may arrive at once."""
        streams: list[Stream] = []

        def steps() -> Generator[int, None, None]:
            yield ADMISSION_COST
            streams.append(self._driver.submit(admitted, text))

        try:
            await self._slices.run(admitted.tenant, steps())
        except BaseException:
            # The caller may be cancelled after its turn. The end of the request then gives back its
            # unused tokens.
            for stream in streams:
                self.cancel(stream)
            if not streams:
                self.limits.give_back(admitted.tenant, admitted.most_tokens)
            raise
        return streams[0]

    def cancel(self, stream: Stream) -> None:
        """Cancels the stream's request if it has not ended: the client disconnected or needs no
        more.
        """
        if stream.ended is None:
            self._driver.cancel(stream.request.request_id)

    def _completed(self, resume: tuple[int, ...], sampling: SamplingParams) -> FinishReason | None:
        """Returns the finish reason if the tokens that the client already has are the complete
        answer.
        """
        if not resume:
            return None
        ends = self.card.eos_token_ids if not sampling.ignore_eos else frozenset()
        if len(resume) > sampling.min_tokens and resume[-1] in ends | set(sampling.stop_token_ids):
            return "stop"
        return "length" if len(resume) >= sampling.max_tokens else None
