"""One Prometheus text of several processes."""

from __future__ import annotations

from collections import Counter as Counts

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.observability.exposition import joined

KINDS = (Counter, Gauge, Histogram)
# Text that looks like the format itself, in labels and descriptions.
words = st.sampled_from(["", "a", "\n# HELP x y", '"}', "\\", "é", "# TYPE"])
family = st.tuples(st.integers(0, 5), words, st.dictionaries(words, st.integers(0, 9), max_size=3))


def exposed(families: list[tuple[int, str, dict[str, int]]], process: int) -> bytes:
    registry = CollectorRegistry()
    for number, text, values in {one[0]: one for one in families}.values():
        # A family has the same kind in all processes.
        made = KINDS[number % 3](f"name_{number}", text, ("label", "process"), registry=registry)
        for label, value in values.items():
            one = made.labels(label, str(process))
            one.observe(value) if isinstance(one, Histogram) else one.inc(value)
    return generate_latest(registry)


def samples(text: bytes) -> Counts[str]:
    return Counts(
        repr((one.name, sorted(one.labels.items()), one.value))
        for family in text_string_to_metric_families(text.decode())
        for one in family.samples
        # The time at which a series began.
        if not one.name.endswith("_created")
    )


@given(st.lists(st.lists(family, max_size=4), min_size=1, max_size=4))
def test_has_every_sample_once_and_every_family_once(
    processes: list[list[tuple[int, str, dict[str, int]]]],
) -> None:
    texts = [exposed(families, number) for number, families in enumerate(processes)]
    whole = joined(texts)
    assert samples(whole) == sum((samples(one) for one in texts), Counts[str]())
    heads = [line for line in whole.decode().splitlines() if line.startswith("# HELP ")]
    assert max(Counts(one.split()[2] for one in heads).values(), default=1) == 1


def test_one_text_stays_as_it_is() -> None:
    text = exposed([(0, "a", {"a": 1}), (2, "b", {"b": 2})], 0)
    assert joined([text]) == text
