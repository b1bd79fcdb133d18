"""The experiments as a reader sees them: curves or a table, and two sentences about each. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrelay.lab.figures import EngineFigures, LabFigures, NeighbourFigures
from kvrelay.percentiles import percentile
from kvrelay.planning.quantity import size
from kvrelay.types.kv_layout import KvLayout

# Points that a scatter plot shows at most, for each series.
_MOST_POINTS = 500
# Prompts; the median of fewer says little.
_FEW = 10


@dataclass(frozen=True, slots=True)
class Series:
    """A curve, or separate dots. paint: name of a colour of the page."""

    name: str
    points: tuple[tuple[float, float], ...]
    paint: str
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Experiment:
    """One plot with what it shows."""

    title: str
    axes: str
    findings: tuple[str, str]
    series: tuple[Series, ...] = ()
    unit: str = ""
    x_unit: str = ""
    log_y: bool = False
    # (value, text) of a line across the plot, and of one from top to bottom.
    limit: tuple[float, str] | None = None
    mark: tuple[float, str] | None = None
    # A table below the plot: head and rows.
    table: tuple[tuple[str, ...], ...] = ()


def experiments(figures: LabFigures) -> tuple[Experiment, ...]:
    """Returns the experiments, in the order in which they explain each other."""
    return (
        _prefill(figures),
        _position(figures),
        _batch(figures),
        _kv(figures),
        _int8(figures),
        _neighbour(figures),
    )


def _prefill(figures: LabFigures) -> Experiment:
    measured = figures.engine.prefill
    (short, short_s), *_, (long, long_s) = sorted(measured.items())
    more, times = long / short, long_s / short_s
    why = (
        "because each token attends to all tokens before it"
        if times > more
        else "because the fixed cost of a step counts less in a long prompt"
    )
    rate = long / long_s
    one = 1 / min(figures.engine.batch.values())
    return Experiment(
        "Prefill: time to the first token",
        "Milliseconds over the tokens of the prompt. One core, nothing cached.",
        (
            f"{more:.0f} times the tokens take {times:.1f} times the time "
            f"({short:,} tokens: {_ms(short_s)}, {long:,} tokens: {_ms(long_s)}), {why}.",
            f"A step computes many tokens with one read of the weights, so prefill is bound by "
            f"arithmetic: {rate:,.0f} tokens/s, {rate / one:.0f} times the {one:,.0f} tokens/s "
            "of one decoding sequence.",
        ),
        _curves(figures, "prefill"),
        unit=" ms",
        x_unit="tokens",
        log_y=True,
    )


def _position(figures: LabFigures) -> Experiment:
    engine = figures.engine
    (early, early_s), *_, (late, late_s) = sorted(engine.position.items())
    kv = engine.layout.block_bytes / engine.layout.block_size
    rate = (figures.weight_bytes + late * kv) / late_s
    return Experiment(
        "Decode: time per token over the position",
        "Milliseconds for the next token of one sequence, over the tokens before it.",
        (
            f"The token at position {late:,} takes {_ms(late_s)}, {late_s / early_s:.2f} times "
            f"the {_ms(early_s)} at position {early:,}.",
            f"Each token reads all weights, {size(figures.weight_bytes)}, and the KV of all "
            f"tokens before it, {size(late * kv)} at position {late:,}: only the KV grows. That "
            f"is {size(rate)} in a second. With a large model this rate reaches the memory's "
            "bandwidth, which then bounds decode.",
        ),
        _curves(figures, "position"),
        unit=" ms",
        x_unit="tokens",
    )


def _batch(figures: LabFigures) -> Experiment:
    measured = figures.engine.batch
    (_, one_s), *_, (many, many_s) = sorted(measured.items())
    gain = many / many_s * one_s
    return Experiment(
        "Decode: tokens per second over the batch",
        "Tokens per second of all sequences together, over the number of sequences with "
        f"{figures.engine.batch_context} tokens each.",
        (
            f"A step for {many} sequences of {figures.engine.batch_context} tokens takes "
            f"{_ms(many_s)}, {many_s / one_s:.1f} times a step for one, and gives {many} tokens: "
            f"{gain:.1f} times the tokens per second.",
            "The sequences of a batch share one read of the weights, so a decode worker wants "
            "many sequences at once, and room for their KV.",
        ),
        tuple(
            Series(name, tuple((n, n / s) for n, s in sorted(of.batch.items())), paint)
            for name, paint, of in _engines(figures)
        ),
        unit=" tokens/s",
        x_unit="sequences",
    )


def _kv(figures: LabFigures) -> Experiment:
    layout, weights = figures.engine.layout, figures.weight_bytes
    token = layout.block_bytes / layout.block_size
    longest = figures.engine.model_len
    tokens = sorted({max(1, longest >> shift) for shift in range(8)})
    return Experiment(
        "KV cache: bytes over the context",
        "MiB of one sequence's KV, over its tokens.",
        (
            f"Each token takes {size(token)} of KV: {_shape(layout)}.",
            f"The KV of {weights / token:,.0f} tokens, in one sequence or in many, takes as much "
            f"memory as the weights; {longest:,} tokens of one sequence take "
            f"{size(longest * token)}.",
        ),
        (Series(layout.dtype, tuple((n, n * token / 2**20) for n in tokens), "handoff"),),
        unit=" MiB",
        x_unit="tokens",
        log_y=True,
        limit=(weights / 2**20, f"weights: {size(weights)}"),
    )


def _int8(figures: LabFigures) -> Experiment:
    int8 = figures.int8
    title = "Weights of 8 bits"
    if isinstance(int8, str):
        return Experiment(
            title,
            "int8 against the model's own dtype.",
            (f"Not measured: {int8}.", "The other experiments do not need it."),
        )
    rows = [
        (f"{what} {size:,}", own[size], other[size])
        for what, own, other in (
            ("prefill, tokens:", figures.engine.prefill, int8.prefill),
            ("decode step, sequences:", figures.engine.batch, int8.batch),
        )
        for size in sorted(own.keys() & other.keys())
    ]
    if not rows:
        return Experiment(
            title,
            "int8 against the model's own dtype.",
            ("No case was measured in both dtypes.", "Give the lab more time."),
        )
    gains = {name: own / other for name, own, other in rows}
    best, worst = max(gains, key=gains.__getitem__), min(gains, key=gains.__getitem__)
    return Experiment(
        title,
        "int8 against the model's own dtype, one core.",
        (
            f"int8 is {gains[best]:.2f} times as fast in the best case ({best}) and "
            f"{gains[worst]:.2f} times in the worst ({worst}).",
            f"A decode step can gain from the smaller read of the weights: "
            f"{_gained(gains, 'decode')}. A prefill can gain if the processor multiplies 8-bit "
            f"numbers faster: {_gained(gains, 'prefill')}.",
        ),
        table=(
            ("case", "own dtype", "int8", "times as fast"),
            *((name, _ms(own), _ms(other), f"{own / other:.2f}") for name, own, other in rows),
        ),
    )


def _gained(gains: Mapping[str, float], what: str) -> str:
    """Says how many of the cases were faster."""
    mine = [gain for name, gain in gains.items() if name.startswith(what)]
    return f"{sum(gain > 1 for gain in mine)} of {len(mine)} were faster here"


def _neighbour(figures: LabFigures) -> Experiment:
    title = "A noisy neighbour, with and without disaggregation"
    axes = (
        f"Milliseconds between two tokens of four streams, over seconds. From the line on, two "
        f"clients send prompts of {figures.prompt_tokens:,} tokens without a pause. Two workers "
        "with one core each: a prefill and a decode worker, or two that do both."
    )
    if isinstance(figures.neighbour, str):
        return Experiment(
            title,
            axes,
            (f"Not measured: {figures.neighbour}.", "It needs two cores and room for a cluster."),
        )
    forms = {one.form: one for one in figures.neighbour}
    split, whole = forms["disaggregated"], forms["colocated"]
    table = (
        ("", "ITL p50", "ITL p99", "longest gap", "TTFT p50", "tokens/s"),
        *(row for one in (split, whole) for row in _rows(one)),
    )
    if not all(one.beside and one.ttft for one in (split, whole)):
        return Experiment(
            title,
            axes,
            (
                "The time was too short: "
                + ", ".join(
                    f"{one.form}, {len(one.ttft)} prompts and {len(one.beside)} tokens of the "
                    "streams beside them"
                    for one in (split, whole)
                )
                + ".",
                "Give the lab more time with --seconds.",
            ),
            table=table,
        )
    split_itl, whole_itl = (percentile(one.beside, 99) for one in (split, whole))
    split_ttft, whole_ttft = (percentile(one.ttft, 50) for one in (split, whole))
    itl = "shorter" if split_itl < whole_itl else "longer"
    ttft = "sooner" if split_ttft < whole_ttft else "later"
    return Experiment(
        title,
        axes,
        (
            f"Beside the prompts, 1 % of the gaps between tokens exceed {_ms(split_itl)} "
            f"disaggregated and {_ms(whole_itl)} colocated: {_factor(split_itl, whole_itl)} "
            f"{itl} with a decode worker that computes no long prompts. The longest gaps were "
            f"{_ms(max(split.beside))} and {_ms(max(whole.beside))}.",
            f"The prompts had their first token after {_ms(split_ttft)} disaggregated and "
            f"{_ms(whole_ttft)} colocated (median), {_factor(split_ttft, whole_ttft)} {ttft}: "
            f"one prefill worker against two workers that also decode.{_few(split, whole)}",
        ),
        tuple(
            Series(one.form, _thinned(one), paint, dots=True)
            for one, paint in ((whole, "queue"), (split, "decode"))
        ),
        unit=" ms",
        x_unit="s",
        log_y=True,
        mark=(split.prompts_from, "prompts"),
        table=table,
    )


def _few(*forms: NeighbourFigures) -> str:
    """Returns a remark if a median is of few prompts."""
    counts = [len(one.ttft) for one in forms]
    if min(counts) >= _FEW:
        return ""
    each = " and ".join(str(count) for count in counts)
    return f" These medians are of {each} prompts; --seconds gives the lab more time."


def _rows(one: NeighbourFigures) -> list[tuple[str, ...]]:
    end = one.gaps[-1][0] if one.gaps else 0.0
    parts = (
        ("alone", one.alone, one.prompts_from, ()),
        ("beside prompts", one.beside, end - one.prompts_from, one.ttft),
    )
    return [
        (
            f"{one.form}, {name}",
            *(_ms(percentile(gaps, share)) if gaps else "-" for share in (50, 99, 100)),
            _ms(percentile(ttft, 50)) if ttft else "-",
            f"{len(gaps) / seconds:.0f}" if seconds > 0 else "-",
        )
        for name, gaps, seconds, ttft in parts
    ]


def _thinned(one: NeighbourFigures) -> tuple[tuple[float, float], ...]:
    """Keeps the longest gap of each of _MOST_POINTS parts of the time."""
    if not one.gaps:
        return ()
    end = max(at for at, _ in one.gaps)
    longest: dict[int, tuple[float, float]] = {}
    for at, gap in one.gaps:
        part = int(at / end * _MOST_POINTS)
        longest[part] = max(longest.get(part, (at, gap)), (at, gap), key=lambda point: point[1])
    return tuple((at, gap * 1000) for at, gap in sorted(longest.values()))


def _engines(figures: LabFigures) -> Sequence[tuple[str, str, EngineFigures]]:
    found = [("own dtype", "decode", figures.engine)]
    if not isinstance(figures.int8, str):
        found.append(("int8 weights", "prefill", figures.int8))
    return found


def _curves(figures: LabFigures, what: str) -> tuple[Series, ...]:
    def points(measured: Mapping[int, float]) -> tuple[tuple[float, float], ...]:
        return tuple((size, seconds * 1000) for size, seconds in sorted(measured.items()))

    return tuple(
        Series(name, points(getattr(of, what)), paint) for name, paint, of in _engines(figures)
    )


def _shape(layout: KvLayout) -> str:
    kinds = {layer: layout.layers.count(layer) for layer in layout.layers}
    parts = [
        f"{count} layers x {layer.kv_heads} KV heads x "
        f"({' + '.join(map(str, layer.stored_dims))}) values"
        for layer, count in kinds.items()
    ]
    return f"{' + '.join(parts)}, as {layout.dtype}"


def _factor(one: float, other: float) -> str:
    low, high = sorted((one, other))
    return f"{high / low:.1f} times" if low > 0 else "much"


def _ms(seconds: float) -> str:
    value = seconds * 1000
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"
