"""Renders a plan for a terminal of 80 columns."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrelay.planning.advice import Advice
from kvrelay.planning.kv_size import KV_DTYPES, KvSize
from kvrelay.planning.plan import Plan
from kvrelay.planning.quantity import (
    decimal_bytes,
    grouped,
    kib,
    number_of,
    plain,
    rate_of,
    seconds,
)
from kvrelay.planning.references import ASSUMPTIONS, REFERENCES
from kvrelay.planning.sizing.capacity import MOST
from kvrelay.planning.sizing.disaggregated import PoolSize

_WIDTH = 80
# Columns of the names of facts.
_NAMES = 11


def print_plan(view: RenderableType) -> None:
    """Prints the view in at most 80 columns."""
    plain = Console(markup=False, highlight=False)
    width = min(_WIDTH, plain.width) if plain.is_terminal else _WIDTH
    Console(markup=False, highlight=False, width=width).print(view)


def plan_view(
    plan: Plan, *, formulas: bool = False, device_by_default: bool = False
) -> RenderableType:
    """Renders all sections. formulas: whether the formulas and their sources are one of them.
    device_by_default: whether the user named no device.
    """
    parts: list[RenderableType] = [
        Text(f"{_summary(plan)}\n", style="bold"),
        _header(plan, device_by_default),
        _kv(plan),
        _memory(plan),
        _walls(plan),
    ]
    parts += [_users(plan), _roofline(plan), _handoff(plan), _notes(plan)]
    if formulas:
        parts += [_references()]
    if plan.advice is not None:
        parts += [_cluster(plan, plan.advice)]
    return Group(*parts)


def _summary(plan: Plan) -> str:
    """Says in short what a worker is and holds, and for a workload what serves it."""
    users = plan.users[0]
    most = min(users.by_memory, users.by_latency)
    told = f"{plan.question.model.name} on {plan.devices} x {plan.question.device.full_name}: "
    if users.by_memory and not users.by_latency:
        itl_ms = plain(plan.question.slo.itl_s * 1000)
        told += (
            f"a worker of this size serves no user of {users.context:,} tokens within an ITL of "
            f"{itl_ms} ms."
        )
    else:
        told += f"{_count(most)} users of {users.context:,} tokens at once."
    if plan.question.users:
        # With --users, the table has one wall.
        (wall,) = plan.walls
        told += (
            f" With --users {wall.users}, at most {_count(wall.context)} tokens each (limit: "
            f"{wall.limit})."
        )
    return told if plan.advice is None else f"{told} {plan.advice.verdict}"


def _section(title: str) -> Text:
    return Text(f"\n{title}", style="bold")


def _table(*columns: str, text: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        right = name not in text and name != columns[0]
        table.add_column(name, justify="right" if right else "left")
    return table


def _facts(*facts: tuple[str, str]) -> Table:
    """Renders facts, each with its name, in two columns."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=_NAMES)
    # A path may be longer than the line.
    table.add_column(overflow="fold")
    for name, text in facts:
        table.add_row(name, text)
    return table


def _header(plan: Plan, by_default: bool) -> RenderableType:
    question, model = plan.question, plan.question.model
    active = ""
    if model.active_parameters < 0.98 * model.parameters:
        active = f", {number_of(model.active_parameters, 3)} active per token"
    eff, device = question.efficiency, question.device
    return Group(
        Text("Model and device", style="bold"),
        _facts(
            (
                "model",
                f"{model.name}: {number_of(model.parameters, 4)} parameters{active}; attention of "
                f"{len(model.shape.layers)} layers: {plan.kv.kinds}",
            ),
            ("  source", model.source),
            (
                "device",
                f"{plan.devices} x {device.full_name}: {decimal_bytes(device.memory_bytes)}, "
                f"{rate_of(device.rate('bf16'), 'FLOP/s')} bf16 dense, "
                f"{rate_of(device.bandwidth, 'B/s')}, network {rate_of(device.network, 'B/s')}",
            ),
            ("  source", device.source),
            *((("  chosen", "by default; --device NAME plans for another"),) if by_default else ()),
            (
                "  reached",
                f"{eff.compute:.0%} of the matrix rate, {eff.bandwidth:.0%} of the bandwidth, "
                f"{eff.link:.0%} of the links (assumed)",
            ),
            (
                "worker",
                f"{_devices(plan.devices)}: tensor parallel degree {plan.devices} (TP "
                f"{plan.devices})",
            ),
        ),
    )


def _kv(plan: Plan) -> RenderableType:
    shape = plan.question.model.shape
    context = plan.question.context or min(4096, shape.max_position or 4096)
    table = _table("dtype", "native", "compact", f"{context:,} tokens, native")
    for dtype in KV_DTYPES:
        native = KvSize(shape, dtype, "native", is_cpu=plan.kv.is_cpu)
        compact = KvSize(shape, dtype, "compact")
        table.add_row(
            dtype,
            kib(native.bytes_per_token),
            kib(compact.bytes_per_token),
            decimal_bytes(native.sequence_bytes(context)),
        )
    total = f"{plan.kv.bytes_per_token:,.10g} B = {kib(plan.kv.bytes_per_token)} per token"
    lines = f"{plan.kv.dtype}, {plan.kv.form}: {plan.kv.formula}\n  = {total}"
    compact = KvSize(shape, plan.kv.dtype, "compact")
    if any(one.latent for one in shape.layers) and compact.formula != plan.kv.formula:
        lines += f"\ncompact: {compact.formula}\n  = {compact.bytes_per_token:,.10g} B"
    if plan.kv.budget_tokens:
        most = plan.kv.sequence_bytes(plan.kv.budget_tokens)
        lines += f"\n{plan.kv.budget_tokens:,} tokens at most: {decimal_bytes(most)} per sequence"
    elif plan.kv.bytes_per_old_token != plan.kv.bytes_per_token:
        lines += f"\nbeyond all windows: {kib(plan.kv.bytes_per_old_token)} per token"
    return Group(_section("KV cache per token"), Text(lines), table)


def _memory(plan: Plan) -> RenderableType:
    memory = plan.question.model.memory
    table = _table("memory of one worker", "bytes", "how", text=("how",))
    share = f"{plan.question.memory_share:.0%} of {_devices(plan.devices)}"
    table.add_row("usable", decimal_bytes(plan.usable_bytes), share)
    how = f"{memory.weight_dtype}: {memory.source}"
    table.add_row("weights", decimal_bytes(plan.weight_bytes), how)
    chunk = f"a step of {plan.question.chunk_tokens:,} tokens, 256 rows of logits"
    table.add_row("activations", decimal_bytes(plan.activation_bytes), chunk)
    draft = plan.question.draft
    if draft is not None:
        told = f"{draft.name}, {draft.memory.weight_dtype}: {draft.memory.source}"
        table.add_row("draft model", decimal_bytes(draft.memory.weight_bytes), told)
        same = "for as many tokens as the model's KV"
        table.add_row("its KV", decimal_bytes(plan.draft_kv_bytes), same)
    table.add_row("free for KV", decimal_bytes(plan.free_bytes), "the rest")
    return Group(_section("Memory"), table)


def _walls(plan: Plan) -> RenderableType:
    itl = plan.question.slo.itl_s * 1000
    table = _table(
        "users", "longest context", "by memory", f"by ITL {plain(itl)} ms", "by model", "wall"
    )
    for wall in plan.walls:
        table.add_row(
            f"{wall.users:,}",
            _count(wall.context),
            _count(wall.by_memory),
            _count(wall.by_latency),
            f"{wall.by_model:,}" if wall.by_model else "-",
            wall.limit,
        )
    note = Text(
        f"A decode step that reads a full memory takes {seconds(plan.full_step_s)}: with an ITL "
        "below that, the latency is the wall, not the memory."
    )
    title = f"Longest context of each user, in tokens (TP {plan.devices})"
    return Group(_section(title), table, note)


def _users(plan: Plan) -> RenderableType:
    itl = plan.question.slo.itl_s * 1000
    table = _table("context", "most users", "by memory", f"by ITL {plain(itl)} ms")
    for one in plan.users:
        table.add_row(
            f"{one.context:,}",
            _count(min(one.by_memory, one.by_latency)),
            _count(one.by_memory),
            _count(one.by_latency),
        )
    return Group(_section(f"Most users of a context (TP {plan.devices})"), table)


def _roofline(plan: Plan) -> RenderableType:
    table = _table("step", "operations", "bytes", "op/B", "bound", "time", text=("bound",))
    for point in plan.points:
        what = f"prefill, {point.size:,} tokens"
        if point.phase == "decode":
            what = f"decode, {point.size:,} x {point.context:,} tokens"
        table.add_row(
            what,
            rate_of(point.operations, "FLOP"),
            decimal_bytes(point.moved_bytes),
            grouped(point.intensity, 3),
            point.bound,
            seconds(point.seconds),
        )
    roofline = plan.roofline
    note = Text(
        f"Reached: {rate_of(roofline.operations_per_s, 'FLOP/s')} and "
        f"{rate_of(roofline.bytes_per_s, 'B/s')}; above {grouped(roofline.ridge, 3)} op/B "
        "operations bound a step."
    )
    return Group(_section(f"Roofline of one step (TP {plan.devices})"), table, note)


def _handoff(plan: Plan) -> RenderableType:
    table = _table("prompt", "bytes", "transfer", "prefill in chunks", "exposed", "hidden")
    for one in plan.handoffs:
        table.add_row(
            f"{one.tokens:,}",
            decimal_bytes(one.num_bytes),
            seconds(one.transfer_s),
            seconds(one.prefill_s),
            seconds(one.exposed_s),
            f"{one.hidden_share:.0%}",
        )
    chunk = plan.question.chunk_tokens
    title = f"Hand-off at {rate_of(plan.handoff_rate, 'B/s')}, chunks of {chunk:,} tokens"
    title += f" (TP {plan.devices})"
    return Group(_section(title), table)


def _cluster(plan: Plan, advice: Advice) -> RenderableType:
    assert plan.demand is not None
    work, slo = plan.demand.workload, plan.demand.slo
    load = _facts(
        ("source", work.source),
        (
            "arrivals",
            f"{plain(work.rate, 4)} requests/s (mean {plain(work.mean_rate, 4)}), SCV of the gaps "
            f"{plain(work.arrival_scv, 3)}",
        ),
        (
            "lengths",
            f"prompts {work.mean_prompt:,.0f}, answers {work.mean_answer:,.0f} tokens on average; "
            f"{work.cached_share:.0%} of the prompts cached",
        ),
        (
            "SLO",
            f"TTFT {plain(slo.ttft_s * 1000)} ms and ITL {plain(slo.itl_s * 1000)} ms for "
            f"{plain(100 * slo.attainment)}% of the requests",
        ),
    )
    table = _table("pool", "workers", "devices each", "busy", "misses", "sqrt rule", "limit")
    for name, pool in (("prefill", advice.prefill), ("decode", advice.decode)):
        if pool is not None:
            table.add_row(name, *_pool_row(pool))
    merged = advice.colocated
    if merged is not None:
        busy = f"{merged.prompt_share:.0%} prompts"
        row = (f"{merged.workers:,}", str(merged.degree), busy, f"{merged.missed:.2%}")
        table.add_row("colocated", *row, "-", f"chunks of {merged.chunk_tokens:,}")
    parts: list[RenderableType] = [_section("Workload"), load, _section("Pools"), table]
    facts = []
    if advice.decode is not None and advice.prefill is not None:
        decode, prefill = advice.decode, advice.prefill
        facts = [
            (
                "P:D",
                f"{prefill.workers}:{decode.workers} workers, {prefill.devices}:{decode.devices} "
                f"devices; tensor parallel degree {prefill.degree} and {decode.degree}",
            ),
            (
                "prefill",
                f"mean wait {seconds(prefill.wait_s)}; links {prefill.link_utilisation:.1%} busy",
            ),
            (
                "decode",
                f"batch {plain(decode.batch, 3)} of at most {decode.max_batch}; step "
                f"{seconds(decode.step_s)}, at most {seconds(decode.max_step_s)}; links "
                f"{decode.link_utilisation:.1%} busy",
            ),
        ]
    parts.append(_facts(*facts, ("bottleneck", advice.bottleneck)))
    if plan.cost is not None:
        cost = plan.cost
        parts += [
            _section(f"Cost of {_devices(advice.chosen_devices)}"),
            _facts(
                ("per hour", f"{grouped(cost.per_hour, 4)}, in the currency of --price"),
                (
                    "per million",
                    f"{grouped(cost.per_million_output, 4)} for answer tokens, "
                    f"{grouped(cost.per_million_tokens, 4)} for all tokens",
                ),
            ),
        ]
    parts += [_section("Verdict"), Text(advice.verdict, style="bold")]
    return Group(*parts)


def _pool_row(pool: PoolSize) -> tuple[str, ...]:
    return (
        f"{pool.workers:,}",
        str(pool.degree),
        f"{pool.utilisation:.0%}",
        f"{pool.missed:.2%}",
        str(pool.square_root),
        pool.limit,
    )


def _notes(plan: Plan) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0))
    more = "The formulas and their sources: --formulas, --html or --json."
    for one in (*plan.notes, *ASSUMPTIONS, more):
        table.add_row("-", one)
    return Group(_section("Notes and assumptions"), table)


def _references() -> RenderableType:
    lines = [f"{name}: {formula}\n  [{source}]" for name, formula, source in REFERENCES]
    return Group(_section("Formulas and sources"), Text("\n".join(lines)))


def _devices(number: int) -> str:
    return "1 device" if number == 1 else f"{number} devices"


def _count(number: int) -> str:
    return "unlimited" if number >= MOST else f"{number:,}"
