from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidArgument
from kvrelay.planning.step_cost_model import StepCostModel

_SECONDS = st.floats(0, 1e3)
_BENDS = st.dictionaries(st.integers(1, 4096), _SECONDS, max_size=4).map(
    lambda bends: tuple(sorted(bends.items()))
)
_MODELS = st.builds(
    StepCostModel,
    *[_SECONDS] * 10,
    kind=st.sampled_from(["measured", "analytic"]),
    model=st.text(max_size=20),
    device=st.text(max_size=20),
    source=st.text(max_size=20),
    decode_bends=_BENDS,
)


@given(_MODELS)
def test_json_holds_all(model: StepCostModel) -> None:
    assert StepCostModel.parse(json.dumps(model.to_json())) == model


@given(_MODELS, st.integers(1, 3000), st.integers(1, 700), st.integers(0, 5000))
def test_a_prompt_costs_the_sum_of_its_chunks(
    model: StepCostModel, tokens: int, chunk: int, cached: int
) -> None:
    total, done = 0.0, 0
    while done < tokens:
        size = min(chunk, tokens - done)
        total += model.prefill_s(size, cached + done)
        done += size
    assert math.isclose(model.prompt_s(tokens, chunk, cached), total, rel_tol=1e-9, abs_tol=1e-12)


@given(_MODELS)
def test_no_tokens_cost_nothing(model: StepCostModel) -> None:
    assert model.prompt_s(0, 512) == 0


def test_the_formulas_by_hand() -> None:
    model = StepCostModel(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, "measured")
    # 2 tokens after 3: the first attends to 4 tokens, the second to 5.
    assert model.prefill_s(2, 3) == 1 + 2 * 2 + 3 * 9
    assert model.decode_s(2, 30) == 4 + 5 * 2 + 6 * 30
    assert model.handoff_s(100) == 807


def test_sequences_above_a_bend_take_longer() -> None:
    model = StepCostModel(
        1, 2, 3, 4, 5, 6, 7, 8, 9, 10, "measured", decode_bends=((2, 0.5), (8, 1.0))
    )
    assert [model.decode_s(batch, 0) for batch in (1, 2, 3, 8, 10)] == [9, 14, 19.5, 47, 60]


@given(_MODELS, st.integers(1, 5000), st.integers(0, 10**6))
def test_a_larger_batch_costs_no_less_for_each_more(
    model: StepCostModel, batch: int, context: int
) -> None:
    below, at, above = (model.decode_s(batch + more, context) for more in (-1, 0, 1))
    assert above - at >= (at - below) - 1e-9 * above >= -1e-9 * above


def test_costs_without_bends_are_those_of_older_versions() -> None:
    document = StepCostModel(*[0.0] * 10, kind="analytic").to_json()
    assert "decode_bends" not in document
    assert StepCostModel.from_json(document).decode_bends == ()


@pytest.mark.parametrize(
    "bends",
    [
        None,
        5,
        "x",
        {},
        [1, 2],
        [[1]],
        [[1, 0.1, 2]],
        [[0, 0.1]],
        [[1.5, 0.1]],
        [[True, 0.1]],
        [[2, 0.1], [1, 0.1]],
        [[2, 0.1], [2, 0.1]],
        [[2, -0.1]],
        [[2, math.nan]],
        [[2, 1e7]],
        [[2, "x"]],
        [[2**21, 0.1]],
        [[batch, 0.1] for batch in range(1, 18)],
    ],
)
def test_wrong_bends_are_refused(bends: object) -> None:
    document = StepCostModel(*[0.0] * 10, kind="analytic").to_json()
    with pytest.raises(InvalidArgument, match="decode_bends"):
        StepCostModel.from_json({**document, "decode_bends": bends})


@given(
    st.sampled_from(list(StepCostModel.__dataclass_fields__)),
    st.one_of(
        st.none(),
        st.booleans(),
        st.just("x" * 501),
        st.lists(st.integers(), min_size=1, max_size=1),
        st.floats(max_value=-1e-300),
        st.just(math.nan),
        st.just(math.inf),
        st.just(10**400),
        st.dictionaries(st.text(), st.none(), max_size=1),
    ),
)
def test_a_wrong_value_is_refused_by_name(name: str, value: object) -> None:
    document = StepCostModel(*[0.0] * 10, kind="analytic").to_json()
    with pytest.raises(InvalidArgument, match=name):
        StepCostModel.from_json({**document, name: value})


@given(
    st.recursive(
        st.none() | st.text() | st.floats() | st.integers(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    )
)
def test_other_json_is_refused(document: object) -> None:
    with pytest.raises(InvalidArgument):
        StepCostModel.parse(json.dumps(document))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        StepCostModel.parse(text)


@pytest.mark.parametrize("change", [{"other": 1}, {"format": "x"}])
def test_unknown_keys_are_refused(change: dict[str, object]) -> None:
    document = StepCostModel(*[0.0] * 10, kind="analytic").to_json()
    with pytest.raises(InvalidArgument):
        StepCostModel.from_json({**document, **change})


def test_a_missing_key_is_named() -> None:
    document = StepCostModel(*[0.0] * 10, kind="analytic").to_json()
    del document["start_s"]
    with pytest.raises(InvalidArgument, match="start_s is missing"):
        StepCostModel.from_json(document)
