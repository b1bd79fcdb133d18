"""The fields that the generation requests of all dialects share, as pydantic models.

The models check types, lengths of lists and ranges of numbers. `router.frontend.validation` checks
texts, and bounds that depend on the served model, for HTTP and gRPC alike. The schema states the
bounds of texts too: `WithJsonSchema` marks them.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, with_config

# pydantic needs this one for Python 3.11.
from typing_extensions import TypedDict

from kvrelay import sampling_limits
from kvrelay.sampling_limits import INT32, LIMITS
from kvrelay.types.requests import SamplingParams
from router.frontend import validation

_DEFAULTS = SamplingParams()


def sampling(name: str, says: str | None = None, **bounds: float | None) -> Any:
    """Returns an optional sampling field: the bounds of LIMITS unless given, and the default that
    SamplingParams has.
    """
    limits: dict[str, Any] = {"ge": LIMITS[name].least, "le": LIMITS[name].most} | bounds
    extra = {"default": getattr(_DEFAULTS, name)}
    return Field(None, description=says, json_schema_extra=extra, **limits)


def flag(says: str) -> Any:
    """Returns an optional field that is off by default."""
    return Field(False, description=says)


def text(**bounds: int | str) -> WithJsonSchema:
    """States bounds that router.frontend.validation checks."""
    return WithJsonSchema({"type": "string", **bounds})


RequestId = Annotated[
    str, text(maxLength=validation.MAX_REQUEST_ID, pattern="^([!-~]([ -~]*[!-~])?)?$")
]
CacheSalt = Annotated[str, text(minLength=1, maxLength=validation.MAX_CACHE_SALT)]


def _milliseconds(says: str) -> Any:
    return Field(gt=0, le=validation.MAX_SLO_MS, allow_inf_nan=False, description=says)


@with_config(ConfigDict(strict=True, extra="forbid"))
class SloOptions(TypedDict):
    """Latencies to aim for, in milliseconds."""

    ttft_ms: NotRequired[Annotated[float | None, _milliseconds("Time to first token.")]]
    itl_ms: NotRequired[Annotated[float | None, _milliseconds("Time between two tokens.")]]


class Request(BaseModel):
    """A request that may name the model."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = Field(
        None, description="The id that /v1/models returns. Default: the served model."
    )


class Generation(Request):
    """A request that generates text."""

    stream: bool | None = flag("Send server-sent events.")
    temperature: float | None = sampling(
        "temperature", f"Below {sampling_limits.LEAST_TEMPERATURE:g}, sampling is greedy."
    )
    top_p: float | None = sampling("top_p", ge=None, gt=0)
    top_k: int | None = sampling("top_k", "0 and -1 are off.", ge=-1)
    seed: int | None = Field(
        None,
        ge=0,
        le=sampling_limits.MAX_SEED,
        description="The same seed gives the same answers. The first choice of a prompt uses it; "
        "the seeds of the others are derived from it.",
    )
    request_id: RequestId | None = Field(
        None, description="Takes precedence over the header x-request-id."
    )
    priority: int | None = Field(0, ge=-INT32 - 1, le=INT32, description="Lower goes first.")
    cache_salt: CacheSalt | None = Field(
        None,
        description="Requests share cached prompts only with requests of the same tenant and salt. "
        "Use a random, secret salt to keep other users from learning about earlier prompts from "
        "cached_tokens or from the time to the first token.",
    )
    slo: SloOptions | None = Field(
        None,
        description="Latencies to aim for, if larger than those of the cluster.",
    )


class TemplateVariables(BaseModel):
    """The variables of the chat template that a request sets."""

    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables of the model's chat template."
    )
