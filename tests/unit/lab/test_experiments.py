from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_page import drawn_page

from kvrelay.engine.base.kv_memory import TORCH_DTYPE
from kvrelay.lab.experiments import experiments
from kvrelay.lab.figures import EngineFigures, LabFigures, NeighbourFigures
from kvrelay.lab.page import lab_page
from kvrelay.types.kv_layout import KvLayout, LayerKv

SECONDS = st.floats(1e-6, 1e4)


def sizes(least: int) -> st.SearchStrategy[dict[int, float]]:
    return st.dictionaries(st.integers(1, 10**6), SECONDS, min_size=least, max_size=9)


ENGINES = st.builds(
    EngineFigures,
    weights=st.text(max_size=20),
    layout=st.builds(
        KvLayout,
        st.lists(st.builds(LayerKv, *[st.integers(1, 512)] * 3), min_size=1, max_size=4).map(tuple),
        st.sampled_from([1, 16, 32]),
        st.sampled_from(sorted(set(TORCH_DTYPE) - {"int8"})),
    ),
    vocab_size=st.integers(1, 10**6),
    model_len=st.integers(128, 10**7),
    prefill=sizes(2),
    position=sizes(2),
    batch=sizes(2),
    batch_context=st.just(128),
)
# A stream that a prompt blocks until the end has no gap beside it.
GAPS = st.lists(st.tuples(st.floats(1e-3, 100), st.floats(1e-6, 50)), max_size=30)


def neighbour(form: str) -> st.SearchStrategy[NeighbourFigures]:
    return st.builds(
        NeighbourFigures,
        st.just(form),
        GAPS.map(lambda found: tuple(sorted(found))),
        st.floats(0.1, 60),
        st.lists(SECONDS, max_size=9).map(lambda found: tuple(sorted(found))),
    )


FIGURES = st.builds(
    LabFigures,
    model=st.text(max_size=20),
    machine=st.text(max_size=20),
    weight_bytes=st.integers(1, 10**12),
    engine=ENGINES,
    int8=ENGINES | st.just("no kernels"),
    prompt_tokens=st.integers(64, 10**5),
    neighbour=st.tuples(neighbour("disaggregated"), neighbour("colocated")) | st.just("one core"),
)


@given(FIGURES)
def test_any_figures_give_two_sentences_each_and_a_page(figures: LabFigures) -> None:
    found = experiments(figures)
    assert len({one.title for one in found}) == 6
    for one in found:
        assert all(sentence.endswith(".") for sentence in one.findings), one.findings
        assert "nan" not in " ".join(one.findings)
        assert all(
            math.isfinite(value)
            for series in one.series
            for point in series.points
            for value in point
        )
        assert len({len(row) for row in one.table}) <= 1
    page = lab_page(figures)
    data = page.split('id="data">')[1].split("</script>")[0]
    assert len(json.loads(data)["experiments"]) == 6


def engine(**changed: object) -> EngineFigures:
    layout = KvLayout((LayerKv(2, 64, 64),) * 5, 32, "bfloat16")
    one = EngineFigures(
        weights="bfloat16",
        layout=layout,
        vocab_size=2048,
        model_len=4000,
        prefill={64: 0.02, 512: 0.2},
        position={32: 0.002, 4000: 0.003},
        batch={1: 0.002, 32: 0.008},
        batch_context=128,
    )
    return replace(one, **changed)  # type: ignore[arg-type]


def lab(**changed: object) -> LabFigures:
    streams = tuple((0.1 * i, 0.01) for i in range(1, 100))
    stalled = (*streams[:60], *((at, 0.3) for at, _ in streams[60:]))
    one = LabFigures(
        model="demo",
        machine="a machine",
        weight_bytes=2560 * 1000,
        engine=engine(),
        int8=engine(batch={1: 0.001, 32: 0.008}),
        prompt_tokens=1000,
        neighbour=(
            NeighbourFigures("disaggregated", streams, 5.0, (0.2, 0.4, 0.6)),
            NeighbourFigures("colocated", stalled, 5.0, (0.1, 0.2, 0.3)),
        ),
    )
    return replace(one, **changed)  # type: ignore[arg-type]


def findings(figures: LabFigures) -> dict[str, str]:
    return {one.title.split(":")[0]: " ".join(one.findings) for one in experiments(figures)}


def test_the_sentences_follow_from_the_figures() -> None:
    found = findings(lab())
    assert "8 times the tokens take 10.0 times the time" in found["Prefill"]
    assert "2,560 tokens/s, 5 times the 500 tokens/s" in found["Prefill"]
    position = experiments(lab())[1].findings[0]
    assert "takes 3 ms, 1.50 times the 2 ms at position 32" in position
    kv = found["KV cache"]
    assert "2.5 KiB of KV: 5 layers x 2 KV heads x (64 + 64) values, as bfloat16" in kv
    assert "The KV of 1,000 tokens" in kv
    assert (
        "2.00 times as fast in the best case (decode step, sequences: 1)"
        in found["Weights of 8 bits"]
    )
    noisy = found["A noisy neighbour, with and without disaggregation"]
    assert "exceed 10 ms disaggregated and 300 ms colocated: 30.0 times shorter" in noisy
    assert "after 400 ms disaggregated and 200 ms colocated (median), 2.0 times later" in noisy


def test_few_prompts_are_told_with_their_number() -> None:
    title = "A noisy neighbour, with and without disaggregation"
    told = "These medians are of 3 and 3 prompts; --seconds gives the lab more time."
    assert findings(lab())[title].endswith(told)
    split, whole = lab().neighbour
    many = replace(split, ttft=(0.1,) * 10), replace(whole, ttft=(0.1,) * 10)  # type: ignore[type-var]
    assert "These medians" not in findings(lab(neighbour=many))[title]
    none = replace(split, ttft=()), whole  # type: ignore[type-var]
    assert findings(lab(neighbour=none))[title] == (
        "The time was too short: disaggregated, 0 prompts and 49 tokens of the streams beside "
        "them, colocated, 3 prompts and 49 tokens of the streams beside them. Give the lab more "
        "time with --seconds."
    )


def test_prompts_that_scale_better_than_linearly_are_explained_otherwise() -> None:
    found = findings(lab(engine=engine(prefill={64: 0.02, 512: 0.04})))["Prefill"]
    assert "8 times the tokens take 2.0 times the time" in found
    assert "the fixed cost of a step counts less" in found


@pytest.mark.parametrize("part", ["int8", "neighbour"])
def test_what_was_not_measured_says_why(part: str) -> None:
    found = findings(lab(**{part: "the reason"}))
    assert sum("Not measured: the reason." in text for text in found.values()) == 1


def test_gaps_that_began_before_the_prompts_are_counted_on_neither_side() -> None:
    one = NeighbourFigures("colocated", ((1.0, 0.1), (2.1, 0.5), (3.0, 0.2)), 2.0, ())
    assert (one.alone, one.beside) == ([0.1], [0.2])


def test_figures_are_json() -> None:
    json.dumps(asdict(lab()), allow_nan=False)


@pytest.mark.parametrize("width", [390, 1400])
def test_a_browser_draws_all_columns(width: int, tmp_path: Path) -> None:
    busy = lab(disturbance="other programs kept 1.0 of 2 cores busy")
    found = drawn_page(lab_page(busy), tmp_path / "chromium", width)
    assert found["failed"] is None
    assert (found["wide"], found["hidden"], found["cut"], found["overlaps"]) == (0, [], 0, [])
    assert found["banners"] == ["Other programs kept 1.0 of 2 cores busy."]
    assert drawn_page(lab_page(lab()), tmp_path / "quiet", width)["banners"] == []
