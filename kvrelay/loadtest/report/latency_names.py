"""The names and meanings of the latencies in reports, by their keys in the JSON document."""

from __future__ import annotations

# In tables, and in running text.
SHORT_NAMES = {
    "TTFT": "TTFT",
    "second token gap": "gap to token 2",
    "ITL": "ITL",
    "TPOT": "TPOT",
    "E2E": "E2E",
    "late start": "load generator lateness",
}
# In headings.
LONG_NAMES = {
    "TTFT": "Time to first token (TTFT)",
    "second token gap": "Gap to token 2",
    "ITL": "Inter-token latency (ITL)",
    "TPOT": "Time per output token (TPOT)",
    "E2E": "End to end (E2E)",
    "late start": "Load generator lateness",
}
MEANINGS = {
    "TTFT": "time to first token, from the scheduled arrival",
    "second token gap": "time from the first token to the second; includes the hand-off",
    "ITL": "inter-token latency: time between two consecutive tokens",
    "TPOT": "time per output token: (E2E - TTFT) / (tokens - 1) of a request",
    "E2E": "end to end, from the scheduled arrival to the last token",
    "late start": "time from the scheduled arrival to the client's call",
}


def explanation(key: str) -> str:
    """Returns one line that says what a latency is."""
    return f"{SHORT_NAMES[key]}: {MEANINGS[key]}"
