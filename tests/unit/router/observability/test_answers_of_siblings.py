"""What another process of the router says may be anything: one of another version says it."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, generate_latest

from kvrelay.types.control_plane import RouterLoad
from router.core.workers.quarantine import Quarantine
from router.observability.exposition import _checked, joined
from router.observability.recent_requests import newest, read_rows
from router.observability.traffic import Latencies, RouterTraffic, Traffic

OWN = Traffic(RouterLoad("own", running=1), {"finished": 2}, Latencies((0.1,)), Latencies())
ROWS = [{"id": "a", "at": 1.5, "tenant": "acme"}, {"id": "b", "at": 2.5, "tenant": "acme"}]
anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """The document with one part replaced, taken away or added."""
    inside = draw(st.booleans())
    if isinstance(document, dict) and document and inside:
        key = draw(st.sampled_from(sorted(document)))
        return document | {key: draw(changed(document[key]))}
    if isinstance(document, list) and document and inside:
        place = draw(st.integers(0, len(document) - 1))
        return [*document[:place], draw(changed(document[place])), *document[place + 1 :]]
    if isinstance(document, dict) and document:
        rest = dict(document)
        if draw(st.booleans()):
            del rest[draw(st.sampled_from(sorted(rest)))]
            return rest
        return rest | {"new": draw(anything)}
    return draw(anything)


def answers(document: Any) -> st.SearchStrategy[bytes]:
    text = json.dumps(document)
    cut = st.integers(0, len(text)).map(lambda end: text[:end].encode())
    return changed(document).map(lambda one: json.dumps(one).encode()) | cut | st.binary(max_size=9)


@given(answers(json.loads(OWN.to_json())))
@example(OWN.to_json())
def test_traffic_is_refused_or_has_all_that_is_read_of_it(text: bytes) -> None:
    other = None
    with suppress(Exception):
        other = Traffic.from_json(text)
    if other is not None:
        whole = RouterTraffic((OWN, other))
        assert isinstance(whole.load.running, int)
        json.dumps([whole.totals, whole.ttft(50, 95), whole.itl(50, 95)])


@given(answers(ROWS))
@example(json.dumps(ROWS).encode())
def test_rows_are_refused_or_can_be_sorted(text: bytes) -> None:
    rows = None
    with suppress(Exception):
        rows = read_rows(text)
    if rows is not None:
        assert len(json.loads(newest((ROWS, rows), 60))) == len(ROWS) + len(rows)


@given(answers({"ab" * 16: 5.0, "cd" * 16: 6.0}))
def test_a_quarantine_is_refused_or_learnt(text: bytes) -> None:
    quarantine = Quarantine()
    with suppress(Exception):
        quarantine.learn(text)
    quarantine.known(5.5)


def exposed() -> bytes:
    registry = CollectorRegistry()
    Counter("name", "text", ("label",), registry=registry).labels("a").inc()
    return generate_latest(registry)


EXPOSED = exposed()


@given(st.binary(max_size=99) | st.integers(0, len(EXPOSED)).map(lambda end: EXPOSED[:end]))
def test_metrics_are_refused_or_joined(text: bytes) -> None:
    checked = None
    with suppress(ValueError):
        checked = _checked(text)
    if checked is not None:
        assert joined((EXPOSED, checked)).startswith(b"# HELP name_total text\n")
