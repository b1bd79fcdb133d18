from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidArgument
from kvrelay.planning.step_cost_model import StepCostModel

_SECONDS = st.floats(0, 1e3)
_MODELS = st.builds(
    StepCostModel,
    *[_SECONDS] * 10,
    kind=st.sampled_from(["measured", "analytic"]),
    model=st.text(max_size=20),
    device=st.text(max_size=20),
    source=st.text(max_size=20),
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


@given(
    st.sampled_from(list(StepCostModel.__dataclass_fields__)),
    st.one_of(
        st.none(),
        st.booleans(),
        st.just("x" * 501),
        st.lists(st.integers(), max_size=1),
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
