"""`kvrelay demo`: starts a cluster, streams an answer, and proves that KV was handed off."""

from __future__ import annotations

import math
import operator
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from kvrelay.cli.options.cluster import OWN_CLUSTER
from kvrelay.cli.required_packages import requires_cluster_extra
from kvrelay.cli.terminal import interrupt
from kvrelay.cli.views.render import console, ledger_table, milliseconds
from kvrelay.cli.views.typed_text import TypedText
from kvrelay.planning.quantity import size

if TYPE_CHECKING:
    from kvrelay.client import AsyncClient, Completion
    from kvrelay.config.schema import ClusterConfig

STORY = (
    "Once upon a time there was a brave little fox named Ruby. She lived in a small house by the "
    "river. Her best "
    "friend, a rabbit named Oscar, lived next door. Ruby had a golden kite. She loved it very "
    "much. One day she played "
    'by the river, and the kite was gone. Ruby looked everywhere and began to cry. "Do not be '
    'sad," said Oscar. '
    '"I will help you." They looked for a long time.'
)
QUESTION = "What is the name of the fox?"
SUM = "What is 3 plus 4?"
_STARTING = "starting Redis, Ray, a prefill worker, a decode worker and a router"


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim about the run, and the figures that show whether it holds."""

    text: str
    evidence: str
    holds: bool


@requires_cluster_extra
def demo() -> None:
    """Start a small cluster, stream answers through prefill, hand-off and decode, print the proof,
    and stop.

    Example: kvrelay demo
    """
    from kvrelay.config.config_file import load_config
    from kvrelay.process.telemetry import configure_logging

    configure_logging("error")
    raise typer.Exit(interrupt.run(_demo(load_config(None, OWN_CLUSTER))))


async def _demo(config: ClusterConfig) -> int:
    from kvrelay.cli.terminal.serve_screen import ready_line
    from kvrelay.client import AsyncClient
    from kvrelay.launch.local_cluster import LocalCluster

    out = console()
    progress = Console(stderr=True)
    waiting = progress.status(_STARTING)
    waiting.start()
    if not progress.is_terminal:
        progress.print(_STARTING)
    try:
        async with (
            LocalCluster(config, quiet=True) as cluster,
            AsyncClient(cluster.endpoints.grpc) as client,
        ):
            waiting.stop()
            out.print(ready_line(cluster.endpoints), soft_wrap=True)
            # Connects now, so that later times do not include the connection.
            await client.models()
            await _stream(client, out, "a short question", SUM, messages=[("user", SUM)])
            relayed = await _stream(client, out, "a long prompt", STORY, prompt=STORY)
            asked = [("user", f"{STORY}{relayed.text}\n\n{QUESTION}")]
            await _stream(client, out, "a question about it", QUESTION, messages=asked)
            again = await _stream(client, out, "the long prompt again", STORY, prompt=STORY)
            waiting.update("stopping")
            waiting.start()
    finally:
        waiting.stop()
    out.print(Rule("latency breakdown of the long prompt", align="left"))
    out.print(ledger_table(relayed))
    claims = _claims(relayed, again)
    out.print(_table(claims))
    return 0 if all(claim.holds for claim in claims) else 1


async def _stream(
    client: AsyncClient, out: Console, title: str, shown: str, **prompt: Any
) -> Completion:
    """Prints the prompt, the answer as it arrives, its path, and the reason for the path."""
    out.print(Rule(title, align="left"))
    # A terminal without colours shows what is the prompt by the labels.
    out.print("prompt:")
    out.print(shown, style="dim")
    out.print("answer:")
    typed = TypedText(sys.stdout)
    async with client.generate(temperature=0.0, max_tokens=96, **prompt) as stream:
        async for response in stream:
            typed.add(response.text)
        completion = await stream.result()
    out.print(f"\n[{completion.path}: {completion.why}]")
    return completion


def _claims(relayed: Completion, again: Completion) -> list[Claim]:
    ledger = relayed.ledger
    if ledger is None or ledger.handoff is None or relayed.ttft_seconds is None:
        return [Claim("the KV cache was handed off", f"path {relayed.path}: {relayed.why}", False)]
    attempt, handoff = ledger.attempts[-1], ledger.handoff
    equal = sum(map(operator.eq, relayed.token_ids, again.token_ids))
    phases = sum(seconds for _, seconds in ledger.phases)
    return [
        Claim(
            "one worker prefilled the prompt, another decoded the answer",
            f"{attempt.prefill_worker}: prompt and token 1; {attempt.decode_worker}: "
            f"{len(relayed.token_ids) - 1} more",
            relayed.path == "disaggregated" and attempt.prefill_worker != attempt.decode_worker,
        ),
        Claim(
            "the KV cache was transferred completely",
            f"{handoff.blocks} blocks x {handoff.block_bytes} bytes = {handoff.bytes} bytes "
            f"({size(handoff.bytes)}) over {handoff.transport}",
            handoff.bytes == handoff.blocks * handoff.block_bytes > 0,
        ),
        Claim(
            "the ledger accounts for the time to first token",
            f"client {milliseconds(relayed.ttft_seconds)} = phases {milliseconds(phases)} + "
            f"{milliseconds(relayed.ttft_seconds - phases)} between client and router",
            math.isclose(phases, ledger.ttft_seconds) and phases <= relayed.ttft_seconds,
        ),
        Claim(
            "the tokens without a hand-off are identical",
            f"{again.path} path: {equal} of {len(relayed.token_ids)} tokens equal",
            again.path == "local" and again.token_ids == relayed.token_ids,
        ),
    ]


def _table(claims: list[Claim]) -> Table:
    table = Table(title="proof", title_justify="left")
    for column in ("", "claim", "evidence"):
        table.add_column(column)
    for claim in claims:
        table.add_row("yes" if claim.holds else "NO", claim.text, claim.evidence)
    return table
