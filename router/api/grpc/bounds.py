"""Bounds on the number of entries in requests' repeated fields. A field without a bound must be
empty.
"""

from __future__ import annotations

from kvrelay.config.section import MAX_POOL
from kvrelay.protocol_version import MAX_FEATURES
from kvrelay.sampling_limits import MAX_LOGIT_BIAS, MAX_STOP_TOKENS
from kvrelay.wire.encoding.field_bounds import Bounds
from router.frontend.validation import MAX_MESSAGES, MAX_STOPS


def field_bounds(max_model_len: int) -> Bounds:
    """Returns the bounds by full field name."""
    return {
        "kvrelay.v1.GenerateRequest.messages": MAX_MESSAGES,
        "kvrelay.v1.GenerateRequest.token_ids": max_model_len,
        "kvrelay.v1.GenerateRequest.resume": max_model_len,
        "kvrelay.v1.SamplingParams.stop": MAX_STOPS,
        "kvrelay.v1.SamplingParams.stop_token_ids": MAX_STOP_TOKENS,
        "kvrelay.v1.SamplingParams.logit_bias": MAX_LOGIT_BIAS,
        "kvrelay.v1.RestartWorkersRequest.names": 2 * MAX_POOL,
        "kvrelay.v1.Protocol.features": MAX_FEATURES,
    }
