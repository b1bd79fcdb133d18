"""A plan: what a model takes on a device, what fits and what bounds it, and which cluster to take.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.errors import FailedPrecondition, InvalidArgument
from kvrelay.planning.advice import Advice, Cost, advise
from kvrelay.planning.device import Device, Efficiency
from kvrelay.planning.handoff import Handoff, hand_off
from kvrelay.planning.kv_size import KV_DTYPES, KvForm, KvSize
from kvrelay.planning.model_source import PlannedModel
from kvrelay.planning.quantity import decimal_bytes, kib, plain
from kvrelay.planning.roofline import Roofline
from kvrelay.planning.sizing.capacity import (
    Wall,
    free_bytes,
    latency_context,
    latency_users,
    longest_context,
    most_users,
)
from kvrelay.planning.sizing.demand import Demand, LatencySlo
from kvrelay.planning.sizing.worker_kind import FormulaCosts, StepCosts, WorkerKind
from kvrelay.planning.step_cost_model import StepCostModel
from kvrelay.planning.workload import Workload

# Devices of one host, which tensor parallelism can use.
_DEGREES = (1, 2, 4, 8)
_USERS = (1, 10, 50, 200)
_CONTEXTS = (4096, 32_768, 131_072)
_BATCHES = (1, 16, 64, 256)
_PROMPTS = (128, 1024, 8192)


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is asked for."""

    model: PlannedModel
    device: Device
    slo: LatencySlo
    # Devices that serve one copy; None for the fewest that hold the weights.
    devices: int | None = None
    # Share of the memory that weights, activations and KV may take.
    memory_share: float = 0.9
    kv_dtype: str | None = None
    kv_form: KvForm = "native"
    # Tokens of a sequence that have KV (kv.eviction); 0 keeps all.
    kv_budget: int = 0
    efficiency: Efficiency = field(default_factory=Efficiency)
    chunk_tokens: int = 512
    users: int | None = None
    context: int | None = None
    # Bytes per second of the hand-off; None for the network of the devices.
    link: float | None = None
    workload: Workload | None = None
    # Per device and hour.
    price: float | None = None
    # Measured step costs, of one worker of `devices` devices.
    costs: StepCostModel | None = None
    # The model that drafts tokens beside it.
    draft: PlannedModel | None = None


@dataclass(frozen=True, slots=True)
class UsersFit:
    """How many sequences of a context fit."""

    context: int
    by_memory: int
    by_latency: int


@dataclass(frozen=True, slots=True)
class PhasePoint:
    """One step on the roofline."""

    phase: str
    # Tokens of the prompt, or sequences of the batch and the tokens of each.
    size: int
    context: int
    operations: float
    moved_bytes: float
    intensity: float
    bound: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The answers. Bytes, seconds, tokens."""

    question: Question
    kv: KvSize
    # Devices of one worker in all sections but the last.
    devices: int
    usable_bytes: float
    weight_bytes: float
    activation_bytes: float
    free_bytes: float
    # KV of the draft model, for as many tokens as `free_bytes` hold; 0 without a draft model.
    draft_kv_bytes: float
    roofline: Roofline
    walls: tuple[Wall, ...]
    users: tuple[UsersFit, ...]
    points: tuple[PhasePoint, ...]
    handoffs: tuple[Handoff, ...]
    handoff_rate: float
    # Seconds in which a step reads all weights and a full KV memory.
    full_step_s: float
    step_costs: StepCostModel
    demand: Demand | None
    advice: Advice | None
    cost: Cost | None
    notes: tuple[str, ...]


def make_plan(question: Question) -> Plan:
    """Computes all sections. Raises FailedPrecondition if the model does not fit or no cluster
    serves the workload, and InvalidArgument for a value that contradicts the model.
    """
    model = question.model
    dtype = question.kv_dtype or model.kv_dtype
    if dtype not in KV_DTYPES:
        raise InvalidArgument(
            f"--kv-dtype {dtype!r:.40} is unknown; allowed are {', '.join(KV_DTYPES)}"
        )
    if question.draft is not None and question.draft.shape.vocab != model.shape.vocab:
        raise InvalidArgument(
            f"--draft {question.draft.name}: its vocabulary has {question.draft.shape.vocab:,} "
            f"tokens and that of {model.name} {model.shape.vocab:,}; they must be the same"
        )
    kv = KvSize(
        model.shape,
        dtype,
        question.kv_form,
        budget_tokens=question.kv_budget,
        is_cpu=question.device.is_cpu,
    )
    devices, free = _fit(question)
    kept = kv.on(devices)
    roofline = _roofline(question, kv, devices)
    activations = _activations(question)
    usable = devices * question.device.memory_bytes * question.memory_share
    longest = model.shape.max_position
    costs = FormulaCosts(question.costs) if question.costs is not None else None
    rate = question.link or roofline.handoff_rate
    demand = advice = cost = None
    if question.workload is not None:
        demand = Demand(question.workload, question.slo, question.chunk_tokens)
        advice = advise(demand, _kinds(question, kv, costs))
        cost = advice.cost(demand, question.price) if question.price is not None else None
    return Plan(
        question=question,
        kv=kv,
        devices=devices,
        usable_bytes=usable,
        weight_bytes=question.model.memory.weight_bytes,
        activation_bytes=activations,
        free_bytes=free,
        draft_kv_bytes=free * _draft_kv_per_byte(question, devices),
        roofline=roofline,
        walls=tuple(_wall(question, kept, roofline, free, users) for users in _users(question)),
        users=tuple(
            UsersFit(
                context,
                most_users(kept, free, context),
                latency_users(roofline, context, question.slo.itl_s),
            )
            for context in _contexts(question)
        ),
        points=_points(roofline, question),
        handoffs=tuple(
            hand_off(roofline, kv, tokens, question.chunk_tokens, rate)
            for tokens in _prompts(question)
        ),
        handoff_rate=rate,
        full_step_s=(usable - activations) / roofline.bytes_per_s,
        step_costs=roofline.linear(32, 2048, question.chunk_tokens),
        demand=demand,
        advice=advice,
        cost=cost,
        notes=tuple(_notes(question, kept, longest)),
    )


def _users(question: Question) -> tuple[int, ...]:
    return (question.users,) if question.users else _USERS


def _contexts(question: Question) -> tuple[int, ...]:
    if question.context:
        return (question.context,)
    longest = question.model.shape.max_position or _CONTEXTS[-1]
    return tuple(sorted({min(context, longest) for context in _CONTEXTS}))


def _prompts(question: Question) -> tuple[int, ...]:
    if question.context:
        return (question.context,)
    longest = question.model.shape.max_position or _PROMPTS[-1]
    return tuple(sorted({min(tokens, longest) for tokens in _PROMPTS}))


def _activations(question: Question) -> float:
    return question.model.memory.activation_bytes(question.chunk_tokens, 256)


def _room(question: Question, devices: int) -> float:
    """Returns the bytes that are free for KV of the model. The draft model's KV, which holds as
    many tokens, is beside it.
    """
    memory = devices * question.device.memory_bytes * question.memory_share
    weights = question.model.memory.weight_bytes
    if question.draft is not None:
        weights += question.draft.memory.weight_bytes
    free = free_bytes(memory, weights, _activations(question))
    return free / (1 + _draft_kv_per_byte(question, devices))


def _draft_kv_per_byte(question: Question, devices: int) -> float:
    """Returns the bytes of the draft model's KV for each byte of the model's."""
    if question.draft is None:
        return 0.0
    own, draft = (
        KvSize(one.shape, question.kv_dtype or one.kv_dtype, question.kv_form).on(devices)
        for one in (question.model, question.draft)
    )
    return draft.bytes_per_token / max(own.bytes_per_token, 1)


def _fit(question: Question) -> tuple[int, float]:
    """Returns the devices of one worker, and the bytes that they have free for KV."""
    if question.devices is not None:
        return question.devices, _room(question, question.devices)
    for degree in _DEGREES[:-1]:
        try:
            return degree, _room(question, degree)
        except FailedPrecondition:
            continue
    try:
        return _DEGREES[-1], _room(question, _DEGREES[-1])
    except FailedPrecondition as error:
        raise FailedPrecondition(
            f"{_DEGREES[-1]} x {question.device.full_name}, {question.memory_share:.0%} of "
            f"{decimal_bytes(_DEGREES[-1] * question.device.memory_bytes)}: {error.message}"
        ) from None


def _roofline(question: Question, kv: KvSize, degree: int) -> Roofline:
    memory, device = question.model.memory, question.device
    return Roofline(memory, kv.on(degree), device, question.efficiency, degree)


def _kinds(question: Question, kv: KvSize, costs: StepCosts | None) -> list[WorkerKind]:
    """Returns the workers that the cluster may consist of. Measured costs are those of one kind."""
    if costs is not None or question.devices is not None:
        degree = question.devices or _fit(question)[0]
        one = costs or _roofline(question, kv, degree)
        return [WorkerKind(degree, one, kv.on(degree), _room(question, degree))]
    found = []
    for degree in _DEGREES:
        try:
            room = _room(question, degree)
        except FailedPrecondition:
            continue
        found.append(WorkerKind(degree, _roofline(question, kv, degree), kv.on(degree), room))
    return found


def _wall(question: Question, kv: KvSize, roofline: Roofline, free: float, users: int) -> Wall:
    return Wall(
        users,
        longest_context(kv, free, users),
        latency_context(roofline, users, question.slo.itl_s),
        question.model.shape.max_position,
    )


def _points(roofline: Roofline, question: Question) -> tuple[PhasePoint, ...]:
    context = question.context or min(2048, question.model.shape.max_position or 2048)
    batches = (question.users,) if question.users else _BATCHES
    return (
        *(_point(roofline, "prefill", tokens, tokens) for tokens in _prompts(question)),
        *(_point(roofline, "decode", batch, context) for batch in batches),
    )


def _point(roofline: Roofline, phase: str, size: int, context: int) -> PhasePoint:
    if phase == "prefill":
        parts, seconds = roofline.prefill_parts(size), roofline.prefill_s(size)
    else:
        parts = roofline.decode_parts(size, size * context)
        seconds = roofline.decode_s(size, size * context)
    work = parts[0].plus(parts[1])
    return PhasePoint(
        phase,
        size,
        context,
        work.operations,
        work.moved_bytes,
        work.intensity,
        roofline.bound(work),
        seconds,
    )


def _notes(question: Question, kv: KvSize, longest: int) -> list[str]:
    found = []
    kinds = {layer.kind for layer in question.model.shape.layers}
    compact = KvSize(question.model.shape, kv.dtype, "compact")
    if "latent" in kinds and kv.form == "native" and kv.degree > 1:
        found.append(
            "with several devices kvrelay's engine keeps expanded K and V of latent attention: "
            f"{kib(kv.bytes_per_token)} per token of a worker, and contexts and users are counted "
            f"so. The latent vectors take {kib(compact.bytes_per_token)} (--kv-form compact)"
        )
    windows = any(layer.window for layer in question.model.shape.layers)
    if windows and kv.form == "native" and not (kv.is_cpu and kv.degree == 1):
        found.append(
            "on GPUs and with tensor parallelism kvrelay's engine keeps all tokens of layers with "
            "a window; --kv-form compact counts the windows only"
        )
    if kv.budget_tokens:
        found.append(
            f"sequences keep the KV of {kv.budget_tokens:,} tokens; a prompt is computed whole "
            "before tokens are dropped, so a longer prompt takes its full size until then"
        )
    if "state" in kinds:
        found.append(
            "layers with a state: the bytes of the state are not counted, their parameters are "
            "counted as those of attention, and kvrelay's engine does not run such models"
        )
    if question.workload is not None and longest and question.workload.longest > longest:
        found.append(
            f"the longest request has {question.workload.longest:,} tokens, and the model allows "
            f"{longest:,}"
        )
    expands = "latent" in kinds and kv.form == "native"
    if kv.bytes_per_token > (one := kv.on(1).bytes_per_token) and not expands:
        found.append(
            f"{kv.degree} devices keep copies of KV heads or latent vectors: a token takes "
            f"{kib(kv.bytes_per_token)} of a worker, {plain(kv.bytes_per_token / one, 3)} times "
            "its size"
        )
    if question.draft is not None:
        found.append(
            f"{question.draft.name} drafts on decode workers; its KV is what decode.speculation."
            "memory takes. Prefill workers have more memory than is shown. Step times are without "
            "speculation; docs/guides/speculation.md says what it gains"
        )
        if kv.degree > 1:
            found.append("kvrelay's engine has no draft model beside tensor parallelism")
    if kv.dtype not in ("bf16", "fp16", "float32", "int8", "int4"):
        found.append(f"kvrelay's engine does not keep KV in {kv.dtype}")
    return found
