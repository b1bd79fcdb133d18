"""The tokens that a step adds to a sequence."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from kvrelay.engine.sampling.sampler import Sampled
from kvrelay.types.requests import FinishReason
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.sequence import Sequence
from kvrelay.worker_messages import SequenceTokens


def append_tokens(
    sequence: Sequence, sampled: SequenceOf[Sampled], context: WorkerContext
) -> SequenceTokens:
    """Adds sampled tokens up to the answer's end; returns them for the router. All but the last are
    accepted drafts.
    """
    first_here = sequence.num_emitted == sequence.spec.num_emitted
    index = sequence.num_emitted
    token_ids: list[int] = []
    finish: FinishReason | None = None
    for sample in sampled:
        if token_ids:
            # The step that the draft was in has computed the draft's KV.
            sequence.advance(context.cache, 1)
        finish = sequence.append(
            sample.token_id, context.runner.eos_token_ids, context.runner.max_model_len
        )
        token_ids.append(sample.token_id)
        if finish is not None:
            break
    scores, sequence.scores = sequence.scores, None
    logprobs = (sample.logprobs for sample in sampled[: len(token_ids)])
    return SequenceTokens(
        *sequence.spec.key,
        index=index,
        token_ids=tuple(token_ids),
        logprobs=tuple(logprob for logprob in logprobs if logprob is not None),
        finish_reason=finish,
        prefill=sequence.timings(context.clock.now()) if first_here else None,
        prompt_logprobs=None if scores is None else scores.result(),
        dropped_tokens=sequence.num_dropped,
    )
