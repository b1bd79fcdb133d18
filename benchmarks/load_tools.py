"""Load tools from PyPI: how to install each tool, give it the load and read its results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvrelay.loadtest.report.statistics import Summary, summarize

OPENAI_SCRIPT = Path(__file__).with_name("openai_load.py")
# For guidellm, which would otherwise install the newest torch with CUDA. Any version works, because
# guidellm only passes its prompts through torch.
_TORCH = "torch==2.13.0"
_RESULT = "result.json"
# Warm-up requests, for tools that support them.
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Load:
    """Streamed requests at constant intervals, with fixed prompt and answer lengths."""

    # http://HOST:PORT.
    url: str
    model: str
    # Folder of the model's tokenizer.
    tokenizer: str
    # Use /v1/chat/completions instead of /v1/completions.
    chat: bool
    # Requests per second.
    rate: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    seed: int

    @property
    def path(self) -> str:
        """The path of the endpoint."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The figures that a tool reports for a run. Latencies are in milliseconds."""

    # Requests that were answered without an error.
    requests: int
    errors: int
    # Mean.
    prompt_tokens: float
    # Mean.
    output_tokens: float
    # Median, mean.
    ttft: tuple[float, float]
    itl: tuple[float, float]


@dataclass(frozen=True, slots=True)
class LoadTool:
    """How to install, run and read one tool."""

    # Also the name of the package.
    name: str
    # Arguments of `pip install`, for each call.
    requirements: tuple[tuple[str, ...], ...]
    # The sample of its ITL: all gaps between chunks, or (last - first) / (tokens - 1) of each
    # request.
    itl_of: Literal["gap", "request"]
    # (bin folder, load, output folder) -> command line.
    command: Callable[[Path, Load, Path], list[str]]
    # Output folder -> result.
    read: Callable[[Path], ToolResult]


def _openai_command(binaries: Path, load: Load, folder: Path) -> list[str]:
    return [
        *(
            str(binaries / "python"),
            str(OPENAI_SCRIPT),
            "--base-url",
            f"{load.url}/v1",
            "--model",
            load.model,
        ),
        *(
            "--rate",
            str(load.rate),
            "--num-requests",
            str(load.num_requests),
            "--seed",
            str(load.seed),
        ),
        *("--prompt-tokens", str(load.prompt_tokens), "--output-tokens", str(load.output_tokens)),
        *("--out", str(folder / _RESULT), *(["--chat"] if load.chat else [])),
    ]


def _openai_result(folder: Path) -> ToolResult:
    rows = _json(folder / _RESULT)["requests"]
    answered = [row for row in rows if not row["error"]]
    return ToolResult(
        requests=len(answered),
        errors=len(rows) - len(answered),
        prompt_tokens=_mean([row["prompt_tokens"] for row in answered]),
        output_tokens=_mean([row["output_tokens"] for row in answered]),
        ttft=_milliseconds([row["ttft_s"] for row in answered]),
        itl=_milliseconds([gap for row in answered for gap in row["itl_s"]]),
    )


def _vllm_command(binaries: Path, load: Load, folder: Path) -> list[str]:
    return [
        *(
            str(binaries / "python"),
            "-m",
            "vllm.entrypoints.cli.main",
            "bench",
            "serve",
            "--base-url",
            load.url,
        ),
        *("--backend", "openai-chat" if load.chat else "openai", "--endpoint", load.path),
        *("--model", load.model, "--tokenizer", load.tokenizer),
        *("--dataset-name", "random", "--random-input-len", str(load.prompt_tokens)),
        *("--random-output-len", str(load.output_tokens), "--ignore-eos", "--seed", str(load.seed)),
        *(
            "--num-prompts",
            str(load.num_requests),
            "--request-rate",
            str(load.rate),
            "--burstiness",
            "inf",
        ),
        *("--num-warmups", str(_WARM_UP)),
        *(
            "--save-result",
            "--result-dir",
            str(folder),
            "--result-filename",
            _RESULT,
            "--disable-tqdm",
        ),
    ]


def _vllm_result(folder: Path) -> ToolResult:
    found = _json(folder / _RESULT)
    answered = found["completed"]
    return ToolResult(
        requests=answered,
        errors=found["failed"],
        prompt_tokens=found["total_input_tokens"] / max(answered, 1),
        output_tokens=found["total_output_tokens"] / max(answered, 1),
        ttft=(found["median_ttft_ms"], found["mean_ttft_ms"]),
        itl=(found["median_itl_ms"], found["mean_itl_ms"]),
    )


def _guidellm_command(binaries: Path, load: Load, folder: Path) -> list[str]:
    backend = f"kind=openai_http,target={load.url},model={load.model},request_format={load.path}"
    data = (
        f"kind=synthetic_text,prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}"
    )
    return [
        *(str(binaries / "guidellm"), "run", "--disable-console-interactive", "--backend", backend),
        *("--tokenizer", f"kind=huggingface_auto,model={load.tokenizer}", "--data", data),
        *(
            "--seed",
            f"kind=static,value={load.seed}",
            "--profile",
            f"kind=constant,rate={load.rate}",
        ),
        *("--constraint", f"kind=max_requests,count={load.num_requests}"),
        *("--output", f"kind=json,path={folder / _RESULT}"),
    ]


def _guidellm_result(folder: Path) -> ToolResult:
    (found,) = _json(folder / _RESULT)["benchmarks"]
    metrics = found["metrics"]
    totals = metrics["request_totals"]

    def of(name: str) -> dict[str, float]:
        return metrics[name]["successful"]

    return ToolResult(
        requests=totals["successful"],
        errors=totals["errored"] + totals["incomplete"],
        prompt_tokens=of("prompt_token_count")["mean"],
        output_tokens=of("output_token_count")["mean"],
        ttft=(of("time_to_first_token_ms")["median"], of("time_to_first_token_ms")["mean"]),
        itl=(of("inter_token_latency_ms")["median"], of("inter_token_latency_ms")["mean"]),
    )


def _aiperf_command(binaries: Path, load: Load, folder: Path) -> list[str]:
    return [
        *(
            str(binaries / "aiperf"),
            "profile",
            "--model",
            load.model,
            "--url",
            load.url,
            "--streaming",
        ),
        *("--endpoint-type", "chat" if load.chat else "completions", "--tokenizer", load.tokenizer),
        *(
            "--isl",
            str(load.prompt_tokens),
            "--isl-stddev",
            "0",
            "--osl",
            str(load.output_tokens),
            "--osl-stddev",
            "0",
        ),
        *(
            "--extra-inputs",
            "ignore_eos:true",
            "--use-server-token-count",
            "--random-seed",
            str(load.seed),
        ),
        *(
            "--request-count",
            str(load.num_requests),
            "--request-rate",
            str(load.rate),
            "--arrival-pattern",
            "constant",
        ),
        *(
            "--warmup-request-count",
            str(_WARM_UP),
            "--artifact-dir",
            str(folder),
            "--ui",
            "none",
            "--no-gpu-telemetry",
        ),
    ]


def _aiperf_result(folder: Path) -> ToolResult:
    found = _json(folder / "profile_export_aiperf.json")

    def of(name: str) -> dict[str, float]:
        return found.get(name) or {"avg": 0.0, "p50": 0.0}

    return ToolResult(
        requests=round(of("request_count")["avg"]),
        errors=round(of("error_request_count")["avg"]),
        prompt_tokens=of("input_sequence_length")["avg"],
        output_tokens=of("output_sequence_length")["avg"],
        ttft=(of("time_to_first_token")["p50"], of("time_to_first_token")["avg"]),
        itl=(of("inter_token_latency")["p50"], of("inter_token_latency")["avg"]),
    )


TOOLS = {
    tool.name: tool
    for tool in (
        LoadTool("openai", (("openai==3.54.0",),), "gap", _openai_command, _openai_result),
        LoadTool("vllm", (), "gap", _vllm_command, _vllm_result),
        LoadTool(
            "guidellm",
            ((_TORCH,), ("guidellm==0.8.1",)),
            "request",
            _guidellm_command,
            _guidellm_result,
        ),
        LoadTool("aiperf", (("aiperf==0.13.0",),), "request", _aiperf_command, _aiperf_result),
    )
}


def _json(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def _milliseconds(seconds: list[float]) -> tuple[float, float]:
    """Returns median and mean."""
    summary: Summary | None = summarize(seconds)
    return (summary.median * 1000, summary.mean * 1000) if summary else (0.0, 0.0)
