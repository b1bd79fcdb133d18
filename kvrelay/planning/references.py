"""The formulas of a plan with their sources, and its assumptions."""

from __future__ import annotations

# (what, formula, source)
REFERENCES: list[tuple[str, str, str]] = [
    (
        "KV bytes per token",
        "2 x layers x KV heads x head dim x bytes; MLA: layers x (latent + rope dim) x bytes",
        "Pope et al. 2022, sec. 2.1; Ainslie et al. 2023 (GQA), sec. 2.2; DeepSeek-V2 2024, "
        "sec. 2.1.4",
    ),
    (
        "KV of tensor parallel devices",
        "each keeps ceil(KV heads / devices) heads, and whole latent vectors",
        "Pope et al. 2022, sec. 3.3",
    ),
    (
        "longest context",
        "(memory - weights - activations) / users / KV bytes per token",
        "Kwon et al. 2023 (PagedAttention), sec. 3",
    ),
    (
        "operations",
        "2 x parameters x tokens + 2 x layers x heads x (K dim + V dim) x pairs",
        "Kaplan et al. 2020, sec. 2.1 and table 1",
    ),
    (
        "decode over latent vectors",
        "heads x (latent + rope dim + latent) values per pair, with absorbed matrices",
        "DeepSeek-V2 2024, sec. 2.1.2",
    ),
    (
        "step time",
        "sum over kernels of max(operations / rate, bytes / bandwidth)",
        "Williams et al. 2009 (roofline), sec. 3; Zhu et al. 2024 (NanoFlow), sec. 3",
    ),
    (
        "experts read by a step",
        "experts x (1 - (1 - chosen / experts) ^ tokens)",
        "occupancy with an even router: Feller 1968, vol. 1, ch. IV",
    ),
    (
        "tensor parallelism",
        "2 all-reduces per layer of 2 (n - 1) / n x tokens x hidden x 2 B",
        "Shoeybi et al. 2019 (Megatron-LM), sec. 3; Patarasuk and Yuan 2009",
    ),
    (
        "hidden hand-off",
        "each chunk is sent while the next one is computed",
        "Patel et al. 2024 (Splitwise), sec. IV.C; Zhong et al. 2024 (DistServe), sec. 3.3",
    ),
    (
        "prefill wait",
        "M/G/c: Erlang C x exp(-t / (spread / (c / S - rate))), spread = (Ca2 + Cs2) / 2",
        "Allen 1990, ch. 5; Whitt 1993 (GI/G/m); tail: Kingman 1961",
    ),
    (
        "decode slots",
        "Erlang C over workers x batch slots, grouped by (Ca2 + 1) / 2",
        "Cooper 1981, ch. 3; Whitt 1984 (Hayward's approximation)",
    ),
    (
        "square-root staffing",
        "load + beta x sqrt(load)",
        "Halfin and Whitt 1981, proposition 1",
    ),
    (
        "colocated cluster",
        "chunks beside the decode batch, as large as the ITL allows",
        "Agrawal et al. 2024 (Sarathi-Serve), sec. 4.2",
    ),
]

ASSUMPTIONS: list[str] = [
    "A GB has 10^9 bytes, as in data sheets; a KiB has 1,024.",
    "Shares of peak rates that an engine reaches: --compute-efficiency, --bandwidth-efficiency, "
    "--link-efficiency. Measure yours with `kvrelay bench engine`.",
    "Matrix products have the rate of the weights' dtype, attention at most that of bf16.",
    "An all-reduce has a latency of 10 us; a step has no other fixed cost.",
    "Experts are chosen evenly. Speculation is off. Prefix caches hold --cached-share of the "
    "prompts.",
    "Hand-offs take at most 70 % of a link. Of the requests that may miss the SLO, 95 % "
    "are left to the prefill pool.",
]
