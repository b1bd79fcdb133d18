"""The README of the demo model: what it is, how it was made, how good it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Report:
    """How a training went. Perplexities are per token, over held-out documents."""

    seed: int
    steps: int
    threads: int
    tokens: int
    seconds: float
    cpu_seconds: float
    parameters: int
    held_out_documents: int
    perplexity: float
    bigram_perplexity: float
    unigram_perplexity: float
    answers_alone: tuple[int, int]  # right, asked: questions without a story
    answers_about_stories: tuple[int, int]

    @property
    def command(self) -> str:
        return (
            "python scripts/train_demo.py --out kvrelay/models/demo "
            f"--steps {self.steps} --seed {self.seed} --threads {self.threads}"
        )


def of(answers: tuple[int, int]) -> str:
    return "{} of {}".format(*answers)


def readme(report: Report) -> str:
    return f"""# demo

The model that `kvrelay serve --model demo` serves: a Llama-shaped transformer with
{report.parameters:,} parameters in bfloat16, grouped-query attention (4 query heads, 2 KV heads, 64
wide), a context of 4096 tokens and a byte-level tokenizer of its own. It tells short stories and
knows a few plain facts; it gets a third of small sums right, and of questions about a story the
form, and the names and things now and then. It is here to make a cluster visible on a laptop; it is
no general assistant.

Its only training text is what `scripts/demo_corpus.py` writes. Code, text and weights are under
this repository's Apache-2.0 licence.

| | |
|---|---|
| command | `{report.command}` |
| seed | {report.seed} |
| steps | {report.steps:,} |
| training tokens | {report.tokens:,} |
| seconds (of CPU time) | {report.seconds:,.0f} ({report.cpu_seconds:,.0f}) |
| held-out perplexity per token, {report.held_out_documents} documents | {report.perplexity:.3f} |
| the same of a bigram model | {report.bigram_perplexity:.2f} |
| the same of a unigram model | {report.unigram_perplexity:.1f} |
| held-out questions without a story, answered word for word | {of(report.answers_alone)} |
| held-out questions about a story, answered word for word | {of(report.answers_about_stories)} |

A document of the grammar begins with a free choice of names, animals, places and plot, and the
perplexity counts these choices; what follows from them is all but certain.
"""
