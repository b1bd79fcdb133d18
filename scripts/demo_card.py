"""The README of the demo model: its purpose, its training and its quality."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a training run. Perplexities are per token, over held-out documents."""

    seed: int
    steps: int
    threads: int
    # The highest learning rate.
    peak: float
    # Whether the training went on with an earlier model.
    went_on: bool
    tokens: int
    seconds: float
    cpu_seconds: float
    parameters: int
    held_out_documents: int
    perplexity: float
    bigram_perplexity: float
    unigram_perplexity: float
    # (right, asked) for questions without a story.
    answers_alone: tuple[int, int]
    # (right, asked) for questions about a story.
    answers_about_stories: tuple[int, int]
    # (right, asked) for sums of two numbers up to 10.
    sums: tuple[int, int]
    # (right, asked) for calls of functions.
    calls: tuple[int, int]

    @property
    def command(self) -> str:
        """The command of the training run."""
        return (
            "python scripts/train_demo.py --out kvrelay/models/demo "
            f"--steps {self.steps} --seed {self.seed} --threads {self.threads}"
            f" --learning-rate {self.peak:g}"
            f"{' --begin-with kvrelay/models/demo' if self.went_on else ''}"
        )


BEFORE = "The training went on with the weights of an earlier run. The last run:\n\n"


def of(answers: tuple[int, int]) -> str:
    """Formats (right, asked) as `RIGHT of ASKED`."""
    return "{} of {}".format(*answers)


def readme(report: Report) -> str:
    """Returns the text of the README."""
    return f"""# demo

`kvrelay serve --model demo` serves this model. It is a Llama-shaped transformer with
{report.parameters:,} parameters in bfloat16, grouped-query attention (4 query heads, 2 KV heads, 64
wide), a context of 4096 tokens and its own byte-level tokenizer. The model tells short stories,
knows a few simple facts, adds small numbers, and calls functions. Most of its answers to questions
about a story have the right names and things. The model makes it possible to run a cluster on a
laptop. It is not a general assistant.

If functions for arithmetic, the weather, the time, a price or a search are offered, under the usual
names (`calculate(expression)`, `add(a, b)`, `get_weather(city)`, `search(query)`), it calls the
right one and then answers with what the function returned. It copies invented names wrongly about
half of the time, and knows no other functions.

`scripts/demo_corpus.py` generates all of its training text. Code, text and weights are under this
repository's Apache-2.0 licence.

{BEFORE if report.went_on else ""}| | |
|---|---|
| command | `{report.command}` |
| seed | {report.seed} |
| steps | {report.steps:,} |
| training tokens | {report.tokens:,} |
| seconds (of CPU time) | {report.seconds:,.0f} ({report.cpu_seconds:,.0f}) |
| held-out perplexity per token, {report.held_out_documents} documents | {report.perplexity:.3f} |
| held-out perplexity of a bigram model | {report.bigram_perplexity:.2f} |
| held-out perplexity of a unigram model | {report.unigram_perplexity:.1f} |
| held-out questions without a story, answered word for word | {of(report.answers_alone)} |
| held-out questions about a story, answered word for word | {of(report.answers_about_stories)} |
| sums of two numbers up to 10 | {of(report.sums)} |
| held-out calls of a function, word for word | {of(report.calls)} |

Each document begins with a random choice of names, animals, places and plot. The perplexity
includes these choices. The rest of the document is almost determined by them.
"""
