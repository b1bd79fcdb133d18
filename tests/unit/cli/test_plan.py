"""`kvrelay plan`: its views, its inputs, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.drawn_page import drawn_page

import kvrelay
from kvrelay.cli.main import run
from kvrelay.planning.step_cost_model import StepCostModel

WORKLOAD = ("--rate", "5", "--prompt-tokens", "100-900", "--output-tokens", "50-200")
ROOT = Path(kvrelay.__file__).parents[1]
EVIL = "</script><b>x</b>"
Capture = pytest.CaptureFixture[str]


def plan(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """Runs the command; returns its exit code, stdout and stderr."""
    code = run(["plan", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def document(capsys: Capture, *arguments: str) -> dict[str, Any]:
    code, out, err = plan(capsys, *arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_text_fits_80_columns(capsys: Capture) -> None:
    code, out, _ = plan(capsys, "deepseek-v3", "--device", "h200", *WORKLOAD, "--price", "2.5")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    for text in ("68.62 KiB", "61 layers x 576 latent values x 2 B", "bottleneck", "per million"):
        assert text in out


def test_each_table_says_its_degree_and_each_figure_its_unit(capsys: Capture) -> None:
    _, out, _ = plan(capsys, "llama-3.1-70b", *WORKLOAD, "--price", "3")
    lines = [line.rstrip() for line in out.splitlines()]
    assert "worker       2 devices: tensor parallel degree 2 (TP 2)" in lines
    assert sum(line.endswith("(TP 2)") for line in lines) == 5
    assert "70.55 billion parameters" in out
    assert " B parameters" not in out
    assert "--device NAME plans for another" in out
    assert "in the currency of --price" in out
    assert any(line.startswith("prefill, 1,024 tokens") for line in lines), "of one step"
    assert any("prefill in chunks" in line for line in lines), "of the hand-off"
    assert "--device NAME" not in plan(capsys, "llama-3.1-70b", "--device", "h200")[1]


def test_the_guide_has_the_figures_of_its_example(capsys: Capture) -> None:
    guide = (ROOT / "docs/guides/planning.md").read_text()
    (command,) = re.findall(r"^kvrelay (plan llama-3.1-70b --memory .*)$", guide, re.MULTILINE)
    found = document(capsys, *command.split()[1:])
    (wall,) = found["longest_context"]
    tokens = int(found["memory"]["kv_bytes"] / found["kv"]["bytes_per_token"])
    for figure in (tokens, wall["tokens_by_memory"], tokens // 5, wall["tokens"]):
        assert f"{figure:,}" in guide
    for size in ("activation_bytes", "kv_bytes"):
        assert f"{found['memory'][size] / 1e9:.4g}"[:5] + " GB" in guide


def test_the_text_has_short_headings(capsys: Capture) -> None:
    _, out, _ = plan(capsys, "llama-3.1-8b", *WORKLOAD, "--price", "3")
    headings = [
        after
        for before, after in pairwise(["", *(line.rstrip() for line in out.splitlines())])
        if not before
    ]
    summary, *headings = headings
    assert summary.startswith("llama-3.1-8b on 1 x NVIDIA H100 SXM: 103 users of 4,096 tokens")
    assert "Do not disaggregate" in "".join(out.splitlines()[:3])
    assert headings[:3] == ["Model and device", "KV cache per token", "Memory"]
    assert headings[-4:-2] == ["Workload", "Pools"]
    assert headings[-2].startswith("Cost of ")
    assert headings[-1] == "Verdict"
    assert max(map(len, headings)) <= 50
    assert "e+" not in out


def test_a_small_model_has_small_words_and_no_row_beyond_its_context(capsys: Capture) -> None:
    _, out, _ = plan(capsys, "demo", "--device", "h100")
    assert "demo: 3.719 million parameters; attention of 5 layers: 5 GQA\n" in re.sub(
        " +\n", "\n", out
    )
    assert "8,192" not in out
    assert "prefill, 4,096 tokens" in out


@pytest.mark.parametrize("formulas", [False, True])
def test_the_last_line_is_the_verdict_and_formulas_are_printed_when_asked_for(
    capsys: Capture, formulas: bool
) -> None:
    workload = ("--rate", "1", "--prompt-tokens", "100", "--output-tokens", "10")
    _, out, _ = plan(capsys, "llama-3.1-8b", *workload, *(["--formulas"] if formulas else []))
    assert "Do not disaggregate" in "".join(out.splitlines()[-2:])
    assert ("PagedAttention" in out) is formulas


@pytest.mark.parametrize("draft", ["llama-3.2-1b", "llama-3.2-3b"])
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_a_draft_model_takes_weights_and_kv_for_the_same_tokens(
    capsys: Capture, draft: str, dtype: str
) -> None:
    one = ("--devices", "1", "--device", "h100", "--kv-dtype", dtype)
    alone = document(capsys, "llama-3.1-8b", *one)
    small = document(capsys, draft, *one)
    both = document(capsys, "llama-3.1-8b", "--draft", draft, *one)
    memory = both["memory"]
    assert memory["draft_weight_bytes"] == small["memory"]["weight_bytes"]
    tokens = memory["kv_bytes"] / both["kv"]["bytes_per_token"]
    assert memory["draft_kv_bytes"] == pytest.approx(tokens * small["kv"]["bytes_per_token"])
    taken = sum(memory[f"{what}_bytes"] for what in ("kv", "draft_kv", "draft_weight"))
    assert taken == pytest.approx(alone["memory"]["kv_bytes"])


def test_a_draft_model_of_another_vocabulary_is_refused(capsys: Capture) -> None:
    code, _, said = plan(capsys, "llama-3.1-8b", "--draft", "qwen3-0.6b")
    assert (code, "they must be the same" in said) == (2, True)


def test_the_budget_of_a_70b_model(capsys: Capture) -> None:
    asked = ("llama-3.1-70b", "--memory", "320GB", "--weight-memory", "140GB", "--users", "50")
    wall = document(capsys, *asked)["longest_context"][0]
    # (320 GB - 140 GB) / 50 / 320 KiB is 10,986; activations take 0.1 % of it.
    assert 10_960 <= wall["tokens_by_memory"] <= 10_986


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--users", "4"), "With --users 4, at most 8,192 tokens each (limit: model)."),
        (("--users", "400", "--context", "8192"), "at most 1,063 tokens each (limit: memory)."),
    ],
)
def test_the_summary_answers_for_the_users_that_were_given(
    capsys: Capture, options: tuple[str, ...], told: str
) -> None:
    _, out, _ = plan(capsys, "llama-3-8b", *options)
    assert told in " ".join(out.split())
    assert "--users" not in plan(capsys, "llama-3-8b")[1]


def test_the_summary_says_what_a_worker_cannot_serve(capsys: Capture) -> None:
    _, text, _ = plan(capsys, "llama-3.1-8b", "--device", "h100", "--itl-ms", "4")
    said = " ".join(text.split())
    assert "a worker of this size serves no user of 4,096 tokens within an ITL of 4 ms." in said
    assert "0 users" not in said.partition("Model and device")[0]


def test_the_json_has_every_section(capsys: Capture) -> None:
    found = document(capsys, "llama-3.1-8b", *WORKLOAD, "--ttft-ms", "500", "--itl-ms", "30")
    assert found["kv"]["bytes_per_token"] == 131_072
    assert found["cluster"]["verdict"].startswith("Do not disaggregate: a colocated cluster takes")
    assert found["cluster"]["devices"] == 1
    assert {one["bound"] for one in found["roofline"]["steps"]} == {"compute", "bandwidth"}
    assert len(found["references"]) > 8
    StepCostModel.from_json(found["step_costs"])


def test_the_page_is_self_contained(capsys: Capture, tmp_path: Path) -> None:
    folder = tmp_path / "m&m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**USUAL, "model_type": EVIL}))
    page = tmp_path / "plan.html"
    code, _, err = plan(capsys, str(folder), *WORKLOAD, "--html", str(page))
    assert code == 0, err
    text = page.read_text()
    assert EVIL not in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text


@pytest.mark.long
@pytest.mark.parametrize("width", [390, 1400])
def test_a_browser_draws_the_page(capsys: Capture, tmp_path: Path, width: int) -> None:
    page = tmp_path / "plan.html"
    lengths = ("--prompt-tokens", "lognormal:median=1200,sigma=1", "--output-tokens", "50-200")
    code, out, _ = plan(capsys, "llama-3.1-8b", "--rate", "5", *lengths, "--html", str(page))
    assert code == 0
    found = drawn_page(page.read_text(), tmp_path / "chromium", width)
    assert found["failed"] is None
    assert found["plots"] == 6
    assert "Do not disaggregate" in found["text"]
    assert (found["wide"], found["hidden"], found["cut"], found["overlaps"]) == (0, [], 0, [])
    means = re.search(r"prompts ([\d,]+,[\d]+), answers ([\d,]+) tokens on average", out)
    assert means is not None
    assert f"prompts {means[1]} and answers {means[2]} tokens on average" in found["text"]


USUAL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}


def test_a_folder_takes_the_weights_that_it_has(
    capsys: Capture, tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model("llama")
    found = document(capsys, str(folder))
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert 0.8 * weights < found["memory"]["weight_bytes"] <= weights
    assert found["kv"]["dtype"] == "float32"


def test_a_config_that_lies_about_its_weights_is_refused(
    capsys: Capture, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "lie"
    shutil.copytree(tiny_model("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 80}))
    code, _, err = plan(capsys, str(folder))
    assert code == 1
    assert "they belong to different models" in err


def azure(tmp_path: Path, times: list[str], row: str = "1000,100") -> str:
    file = tmp_path / "trace.csv"
    lines = [f"2024-05-10 {time},{row}" for time in times]
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    return str(file)


def test_a_trace_gives_the_rate_of_its_busiest_minute(capsys: Capture, tmp_path: Path) -> None:
    times = [f"00:{minute:02d}:{second:02d}.0000000" for minute in range(5) for second in (0, 30)]
    times += [f"00:05:{second:02d}.0000000" for second in range(60)]
    found = document(capsys, "llama-3.1-8b", "--trace", azure(tmp_path, times))
    assert found["cluster"]["workload"]["rate_per_second"] == pytest.approx(1, rel=0.1)
    assert found["cluster"]["workload"]["mean_prompt_tokens"] == 1000


def record(tmp_path: Path, **changes: Any) -> Path:
    rows = [
        {
            "scheduled_s": n / 4,
            "late_s": 0.0,
            "ttft_s": 0.1,
            "itl_s": [0.01],
            "e2e_s": 0.2,
            "prompt_tokens": 200,
            "cached_tokens": 50,
            "output_tokens": 20,
        }
        | changes
        for n in range(40)
    ]
    from kvrelay.loadtest.report.report_file import save
    from kvrelay.loadtest.report.row import Row
    from kvrelay.loadtest.report.sweep_report import Report

    made = tuple(Row(**{**row, "itl_s": tuple(row["itl_s"])}) for row in rows)
    save(Report({}, (), made), tmp_path / "run.json")
    return tmp_path / "run.json"


def test_a_load_test_gives_its_rate_lengths_and_cached_share(
    capsys: Capture, tmp_path: Path
) -> None:
    found = document(capsys, "llama-3.1-8b", "--record", str(record(tmp_path)))
    work = found["cluster"]["workload"]
    assert work["rate_per_second"] == pytest.approx(4, rel=0.1)
    assert (work["mean_prompt_tokens"], work["mean_answer_tokens"]) == (200, 20)
    assert work["cached_share"] == 0.25


def test_measured_step_costs_replace_the_roofline(capsys: Capture, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    code, _, err = plan(capsys, "llama-3.1-8b", "--step-costs", str(costs))
    assert code == 0, err
    slow = {**json.loads(costs.read_text()), "prefill_token_s": 1e-3}
    costs.write_text(json.dumps(slow))
    fast = document(capsys, "llama-3.1-8b", *WORKLOAD)
    found = document(capsys, "llama-3.1-8b", *WORKLOAD, "--costs", str(costs))
    assert found["cluster"]["devices"] > fast["cluster"]["devices"]


HOLE = ["00:00:00.0", *[f"00:00:{n:02d}.0" for n in range(1, 30)], "02:00:00.0"]


@pytest.mark.parametrize(
    ("times", "row", "says"),
    [
        (HOLE, "1000,100", "there is no request from second 29 on for 7,171 s"),
        (["00:00:00.0", "00:00:01.0"], "1000,", "expected a time and two lengths"),
        (["00:00:00.0", "00:00:01.0"], "-5,3", "must be at least 1"),
        (["00:00:09.0", "00:00:01.0"], "5,3", "earlier than the request"),
        (["00:00:00.0"], "5,3", "give one with --rate"),
        ([], "", "no request"),
        (["00:00:00.0"] * 20, "5,3", "give one with --rate"),
        ([f"00:00:{n:02d}.0" for n in range(20)], f"{10**30},3", "allowed are up to 100,000,000"),
    ],
)
def test_a_bad_trace_is_one_sentence(
    capsys: Capture, tmp_path: Path, times: list[str], row: str, says: str
) -> None:
    code, out, err = plan(capsys, "llama-3.1-8b", "--trace", azure(tmp_path, times, row))
    assert (code, out) == (1, "")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["lama-3.1-8b"], 2, "did you mean llama-3.1-8b"),
        (["llama-3.1-405b", "--device", "l4"], 1, "the model does not fit"),
        (["llama-3.1-70b", *WORKLOAD, "--ttft-ms", "1"], 1, "no cluster meets the SLO"),
        (["llama-3.1-70b", *WORKLOAD, "--itl-ms", "0.5"], 1, "no cluster meets the SLO"),
        (["llama-3.1-70b", "--rate", "1e6"], 1, "no cluster meets the SLO"),
        (["llama-3.1-8b", "--rate", "nan"], 2, "--rate is nan"),
        (["llama-3.1-8b", "--rate", "-1"], 2, "--rate is -1"),
        (["llama-3.1-8b", "--prompt-tokens", "5"], 2, "needs --rate"),
        (["llama-3.1-8b", "--memory", "nan"], 2, "not a size"),
        (["llama-3.1-8b", "--memory", "0GB"], 2, "not a size"),
        (["llama-3.1-8b", "--memory", "9e99GB"], 2, "not a size"),
        (["llama-3.1-8b", "--tflops", "inf"], 2, "--tflops is inf"),
        (["llama-3.1-8b", "--kv-dtype", "int3"], 2, "allowed are float32, bf16"),
        (["llama-3.1-8b", "--kv-form", "x"], 2, "native and compact"),
        (["llama-3.1-8b", "--weights", "x"], 2, "allowed are float32, bf16"),
        (["llama-3.1-8b", "--device", "x"], 2, "known are a100"),
        (["llama-3.1-8b", "--attainment", "1"], 2, "--attainment is 1"),
        (["llama-3.1-8b", "--users", "0"], 2, "--users"),
        (["llama-3.1-8b", "--trace", "/nowhere"], 2, "does not exist"),
        (["llama-3.1-8b", "--record", "/nowhere"], 2, "No such file"),
        (["llama-3.1-8b", "--costs", "/nowhere"], 2, "No such file"),
        (["llama-3.1-8b", "--costs", "/dev/zero"], 2, "not a regular file"),
        (["llama-3.1-8b", "--record", "/dev/zero"], 2, "not a regular file"),
        (["llama-3.1-8b", "--trace", "/dev/zero"], 2, "not a regular file"),
        (["/dev/zero"], 2, "there is no such folder"),
        (["x" * 5000], 2, "is no folder"),
        (["x/" * 5000], 2, "is no folder"),
        (["\0"], 2, "is no folder"),
        (["llama-3.1-8b", "--html", "/nowhere/x.html"], 2, "cannot be written"),
        (["llama-3.1-8b", "--trace-format", "azure"], 2, "requires --trace"),
    ],
)
@pytest.mark.sweep(3)
def test_refusals_are_one_sentence(
    capsys: Capture, arguments: list[str], code: int, says: str
) -> None:
    found, out, err = plan(capsys, *arguments)
    assert (found, out) == (code, ""), err
    assert says in err
    assert err.count("\n") == 1


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
)
KEYS = st.sampled_from(
    [
        *USUAL,
        *("head_dim", "layer_types", "sliding_window", "kv_lora_rank", "qk_rope_head_dim"),
        *("qk_nope_head_dim", "v_head_dim", "num_experts", "num_experts_per_tok", "text_config"),
        *("moe_intermediate_size", "first_k_dense_replace", "tie_word_embeddings", "dtype"),
        *("num_kv_shared_layers", "hybrid_override_pattern", "attn_layer_period"),
        *("mlp_only_layers", "attn_layer_indices", "quantization_config", "global_head_dim"),
        *("use_sliding_window", "max_window_layers", "is_encoder_decoder", "multi_query"),
        *("shared_expert_intermediate_size", "n_shared_experts", "decoder_sparse_step"),
    ]
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.dictionaries(KEYS, ODD | st.integers(0, 9), max_size=6), st.booleans())
@example({"num_hidden_layers": 4096, "hidden_size": 2**31}, True)
@example({"num_experts": 2**31, "num_experts_per_tok": 1}, True)
@example({"layer_types": ["mamba", "mamba"]}, True)
@example({"sliding_window": 1, "use_sliding_window": True, "max_window_layers": 0}, True)
@pytest.mark.long
def test_any_config_gives_a_plan_or_one_sentence(
    capsys: Capture, tmp_path: Path, odd: dict[str, Any], usual: bool
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**(USUAL if usual else {}), **odd}))
    code, out, err = plan(capsys, str(file), "--json", "--rate", "1")
    assert code in (0, 1), err
    if code:
        assert err.count("\n") == 1
        assert "Traceback" not in err
    else:
        json.loads(out)


WORDS = st.one_of(
    st.floats().map(str),
    st.integers(-5, 10**20).map(str),
    st.text(max_size=8),
    st.sampled_from(["80GB", "1e3", "3.35TB/s", "0", "-0", "inf", "nan", "1-2", "lognormal:"]),
)
OPTIONS = st.sampled_from(
    [
        *("--memory", "--tflops", "--bandwidth", "--link", "--memory-share", "--price", "--users"),
        *("--context", "--chunk-tokens", "--ttft-ms", "--itl-ms", "--attainment", "--rate"),
        *("--prompt-tokens", "--output-tokens", "--burstiness", "--cached-share", "--devices"),
        *("--compute-efficiency", "--bandwidth-efficiency", "--link-efficiency", "--weight-memory"),
        *("--kv-dtype", "--weights", "--kv-form", "--device", "--trace-start", "--duration"),
    ]
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.dictionaries(OPTIONS, WORDS, max_size=4))
@example({"--rate": "1", "--output-tokens": "1"})
@example({"--rate": "1000000", "--prompt-tokens": "1", "--output-tokens": "1"})
@example({"--users": "10000000", "--context": "100000000"})
@example({"--tflops": "1e-6", "--bandwidth": "1B"})
@pytest.mark.long
def test_any_options_give_a_plan_or_one_sentence(capsys: Capture, given: dict[str, str]) -> None:
    words = [f"{name}={value}" for name, value in given.items()]
    code, out, err = plan(capsys, "qwen2.5-0.5b", "--json", *words)
    assert code in (0, 1, 2), err
    if code:
        assert err.count("\n") == 1
        assert "Traceback" not in err
    else:
        json.loads(out)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "kvrelay-loadtest-1"}', "\x00\xff"])
@pytest.mark.parametrize("option", ["--record", "--costs", "--trace"])
def test_any_file_is_refused_in_one_sentence(
    capsys: Capture, tmp_path: Path, option: str, text: str
) -> None:
    file = tmp_path / "x"
    file.write_text(text, encoding="latin-1")
    code, _, err = plan(capsys, "llama-3.1-8b", option, str(file))
    # A report of a load test is no file for the other options.
    assert code == (2 if "loadtest" in text and option != "--record" else 1), err
    assert err.count("\n") == 1
