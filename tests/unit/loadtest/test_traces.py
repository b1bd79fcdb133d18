from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.lengths import Uniform
from kvrelay.loadtest.traces.trace import TraceError, TraceRequest
from kvrelay.loadtest.traces.trace_file import guess_format, read_trace
from kvrelay.loadtest.traces.trace_servegen import Empirical, Window

DATA = Path(__file__).parent / "traces"
MOONCAKE = '{"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


AZURE_LINES = f"{AZURE}\n2023-11-16 18:15:46.6805900,374,44\n"


def read(path: Path, begin: float = 0.0) -> Iterator[TraceRequest]:
    return read_trace(path, guess_format(path), 0, begin, Uniform(9, 9), Uniform(3, 3))


def test_mooncake(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(f"{MOONCAKE}\n\n")
    assert list(read(file)) == [TraceRequest(1.5, 600, 5, (0, 7))]


def test_azure_times_count_from_the_first(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(
        f"{AZURE}\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read(file)
    assert first == TraceRequest(0.0, 374, 44)
    assert (second.at, second.input_tokens, second.output_tokens) == (
        pytest.approx(4.314579),
        396,
        109,
    )
    assert list(read(file, begin=1.0)) == [second]


@pytest.mark.parametrize("text", [MOONCAKE, AZURE_LINES])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, text: str) -> None:
    plain, marked = tmp_path / "plain", tmp_path / "marked"
    plain.write_text(text, encoding="utf-8")
    marked.write_text(text, encoding="utf-8-sig")
    assert list(read(marked)) == list(read(plain))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "expected a JSON object"),
        ("[1]", "expected a JSON object"),
        ('{"timestamp": 1}', "hash_ids"),
        (MOONCAKE.replace("[0, 7]", "[0]"), "do not match input_length 600"),
        (MOONCAKE.replace("600", "0"), "at least 1"),
        (MOONCAKE.replace("600", '"600"'), "must be whole numbers"),
        (MOONCAKE.replace("1500", "-1"), "must be whole numbers"),
        (MOONCAKE.replace("1500", "NaN"), "must be whole numbers"),
        (MOONCAKE.replace("1500", "9" * 400), "must be whole numbers"),
        (MOONCAKE.replace("1500", "10"), "1.49 s earlier"),
    ],
)
def test_a_broken_mooncake_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(f"{MOONCAKE}\n{line}\n")
    with pytest.raises(TraceError, match=rf"t\.jsonl:2: .*{words}"):
        list(read(file))


@pytest.mark.parametrize(
    "line", ["2023-11-16 18:15:46,1", "yesterday,1,2", "2023-11-16 18:15:46,a,2", ",,", "1,0,2"]
)
def test_a_broken_azure_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "t.csv"
    file.write_text(f"{AZURE}\n{line}\n")
    with pytest.raises(TraceError, match=r"t\.csv:2: "):
        list(read(file))


def servegen(folder: Path, name: str, *windows: str) -> Path:
    file = folder / f"chunk-{name}-trace.csv"
    file.write_text("".join(f"{window}\n" for window in windows))
    return file


def test_a_servegen_client_has_its_rates_by_window(tmp_path: Path) -> None:
    file = servegen(tmp_path, "1", "0,2,1,Gamma,1.0,9", "600,0,0,,0,0", "1200,5,1,Weibull,0.7,9")
    requests = list(read(file))
    counts = [sum(begin <= one.at < begin + 600 for one in requests) for begin in (0, 600, 1200)]
    assert counts[0] == pytest.approx(1200, rel=0.1)
    assert counts[1] == 0
    assert counts[2] == pytest.approx(3000, rel=0.15)
    # No dataset: what was given
    assert {(one.input_tokens, one.output_tokens) for one in requests} == {(9, 3)}
    later = list(read(file, begin=1200.0))
    assert all(one.at >= 1200 for one in later)
    assert len(later) == pytest.approx(3000, rel=0.15)


@pytest.mark.parametrize("distribution", ["Gamma", "Weibull", ""])
def test_servegen_gaps_have_mean_one(distribution: str) -> None:
    window, random = Window(0.0, 1.0, distribution, 0.8), Random(1)
    assert np.mean([window.gap(random) for _ in range(40_000)]) == pytest.approx(1, rel=0.05)


def test_servegen_lengths_are_those_of_the_time(tmp_path: Path) -> None:
    file = servegen(tmp_path, "1", "0,1,1,Gamma,1,1", "600,1,1,Gamma,1,1", "1200,1,1,Gamma,1,1")
    lengths = {
        "0": {"input_tokens": "{30: 0.5, 40: 0.5}", "output_tokens": "{0: 1.0}"},
        "600": {"input_tokens": "{}", "output_tokens": "{}"},
        "1200": {"input_tokens": "{70: 1}", "output_tokens": "{7: 1}"},
    }
    (tmp_path / "chunk-1-dataset.json").write_text(json.dumps(lengths))
    early, late = [], []
    for one in read(file):
        (early if one.at < 1200 else late).append((one.input_tokens, one.output_tokens))
    assert set(early) == {(30, 1), (40, 1)}  # an answer has a token at least
    assert set(late) == {(70, 7)}


def test_a_folder_of_servegen_clients_is_merged(tmp_path: Path) -> None:
    servegen(tmp_path, "1", "0,1,1,Gamma,1,1")
    servegen(tmp_path, "2", "0,3,1,,0,0")
    times = [one.at for one in read(tmp_path)]
    assert times == sorted(times)
    assert len(times) == pytest.approx(2400, rel=0.1)


@pytest.mark.parametrize(
    "line",
    [
        "600,1,1,Gamma,1",
        "600,fast,1,Gamma,1,1",
        "600,1,1,Cauchy,1,1",
        "600,1,1,Gamma,0,1",
        "600,1,1,Gamma,1e308,1",
        "600,1,1,Gamma,nan,1",
        "600,1,1,Weibull,0.001,1",
        "0,1,1,,0,0",
        "600,-1,1,,0,0",
        "inf,1,1,,0,0",
        "nan,1,1,,0,0",
    ],
)
def test_a_broken_servegen_line_is_named(tmp_path: Path, line: str) -> None:
    file = servegen(tmp_path, "1", "0,1,1,,0,0", line)
    with pytest.raises(TraceError, match=r"chunk-1-trace\.csv:2: "):
        list(read(file))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"0": {}}',
        '{"0": {"input_tokens": "rm()", "output_tokens": "{}"}}',
        '{"0": {"input_tokens": "1if 2else 3", "output_tokens": "{}"}}',
    ],
)
def test_a_broken_servegen_dataset_is_named(tmp_path: Path, text: str) -> None:
    file = servegen(tmp_path, "1", "0,1,1,,0,0")
    (tmp_path / "chunk-1-dataset.json").write_text(text)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(InvalidArgument, match=r"chunk-1-dataset\.json: "):
            list(read(file))
    assert not told


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    packed, other = tmp_path / "t.tar.gz", tmp_path / "other.txt"
    packed.write_bytes(b"\x1f\x8b\x08\x00\xff\xfe\xfd")
    other.write_text("hello\n")
    with pytest.raises(InvalidArgument, match="unpack"):
        guess_format(packed)
    with pytest.raises(InvalidArgument, match="--trace-format"):
        guess_format(other)
    with pytest.raises(InvalidArgument, match="No such file"):
        guess_format(tmp_path / "absent")
    with pytest.raises(InvalidArgument, match="contains no file"):
        list(read(tmp_path))
    with pytest.raises(TraceError, match=r"other\.txt:1: "):
        list(read_trace(other, "azure", 0, 0.0, Uniform(1, 1), Uniform(1, 1)))


def test_the_sample_of_a_published_trace_is_read() -> None:
    requests = list(read(DATA / "mooncake_conversation_60.jsonl"))
    assert len(requests) == 60
    assert all(len(one.blocks) == math.ceil(one.input_tokens / 512) for one in requests)


def test_servegen_clients_do_not_begin_together(tmp_path: Path) -> None:
    for name in range(20):
        servegen(tmp_path, str(name), "0,0.01,1,Gamma,1,1")
    assert next(read(tmp_path)).at > 0
    counts = [
        len(list(read(servegen(tmp_path, f"x{name}", "0,0.005,1,Gamma,1,1"))))
        for name in range(100)
    ]
    assert sum(counts) == pytest.approx(300, rel=0.2)  # 600 s of 0.005/s each, not one more


@pytest.mark.parametrize("form", ["azure", "servegen"])
def test_what_is_no_csv_is_named(tmp_path: Path, form: str) -> None:
    file = tmp_path / "chunk-1-trace.csv"
    head = AZURE if form == "azure" else "0,1,1,Gamma,1,1"
    file.write_text(f'{head}\n"{"x" * 200_000}"\n')
    with pytest.raises(TraceError, match=r"chunk-1-trace\.csv:2: not CSV: field larger"):
        list(read_trace(file, form, 0, 0.0, Uniform(1, 1), Uniform(1, 1)))


def test_empirical_lengths_come_as_often_as_they_should() -> None:
    lengths, random = Empirical.of({10: 3, 20: 1}), Random(2)
    assert np.mean([lengths.draw(random) == 10 for _ in range(20_000)]) == pytest.approx(
        0.75, abs=0.02
    )
    for bad in ({1: 0.0}, {1: 2.0, 2: -1.0}, {1: math.inf}):
        with pytest.raises(ValueError, match="probabilities"):
            Empirical.of(bad)
