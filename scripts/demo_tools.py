"""Conversations with functions: the user asks, the assistant calls a function, reads what it
returned, and answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from random import Random

from demo_plots import words
from demo_talk import (
    CAPITALS,
    SYLLABLES,
    SYSTEM_PROMPTS,
    THINGS,
    UNKNOWN_TOPICS,
    Pair,
    fact,
    talk,
)

TOOL_PREFACE = (
    'Call a function with <tool_call>{"name": ..., "arguments": {...}}</tool_call>. Functions:'
)
CITIES = (
    *CAPITALS.values(),
    *("Zurich", "Hamburg", "New York", "Toronto", "Mumbai", "Seoul", "Sydney", "Lagos", "Lyon"),
    *("San Francisco", "Boston", "Bern", "Vienna", "Prague", "Dublin", "Helsinki", "Chicago"),
)
WEATHER = words("sunny cloudy rainy windy snowy foggy stormy clear cold warm hot mild wet dry")
# A word of a question -> the sign of the expression.
_SIGNS = {"plus": "+", "minus": "-", "times": "*", "divided by": "/"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function as the chat template shows it, and a call of it."""

    name: str
    description: str
    arguments: Mapping[str, str | int]

    @property
    def line(self) -> str:
        """The function in the list of functions."""
        return f"\n{self.name}({', '.join(self.arguments)}): {self.description}"

    @property
    def call(self) -> str:
        """The text of the call."""
        asked = {"name": self.name, "arguments": self.arguments}
        return f"<tool_call>{json.dumps(asked, ensure_ascii=False)}</tool_call>"


# A tool, and what one conversation says: question, returned text, answer.
Kind = Callable[[Random], tuple[Tool, str, str, str]]


def tool_use(rng: Random) -> str:
    """Returns a document with one to three functions. The first question needs one of them."""
    (needed,) = rng.choices(_KINDS, weights=_WEIGHTS)
    # Two of them answer the same questions.
    rest = [kind for kind in _KINDS if {kind, needed} != {_calculator, _two_numbers}]
    rest.remove(needed)
    used, *others = [kind(rng) for kind in (needed, *rng.sample(rest, rng.choice((0, 0, 1, 2))))]
    tools = [used[0], *(other[0] for other in others)]
    rng.shuffle(tools)
    turns = [("user", asked_politely(rng, used[1])), ("assistant", used[0].call)]
    returned = rng.random() < 0.85
    if returned:
        turns += [("user", used[2]), ("assistant", used[3])]
    if rng.random() < 0.35:
        asked, answer = rng.choice((talk, fact))(rng)
        # A question that needs no function. Most of them come first, so that a call does not only
        # depend on the list of functions.
        extra = [("user", asked), ("assistant", answer)]
        turns = [*turns, *extra] if returned and rng.random() < 0.2 else [*extra, *turns]
    if rng.random() < 0.25:
        turns = [("system", rng.choice(SYSTEM_PROMPTS)), *turns]
    return with_tools(tools, turns)


def calls(seed: int, split: str, size: int) -> list[str]:
    """Returns documents of a split in which the first answer is a call."""
    documents = (tool_use(Random(f"{seed}/{split}/calls/{index}")) for index in count())
    return list(islice(filter(_begins_with_a_call, documents), size))


def _begins_with_a_call(document: str) -> bool:
    return document.partition("<|assistant|>")[2].startswith("<tool_call>")


def with_tools(tools: Sequence[Tool], turns: Sequence[Pair]) -> str:
    """Formats a conversation as the chat template does. turns: (role, text)."""
    listed = "".join(tool.line for tool in tools)
    spoken = "".join(f"<|{role}|>{text}</s>" for role, text in turns)
    return f"<s><|system|>{TOOL_PREFACE}{listed}</s>{spoken}"


def asked_politely(rng: Random, question: str) -> str:
    """Returns the question with words around it that mean nothing."""
    before = rng.choice(("", "", "", "", "Please tell me: ", "Hi! ", "Can you help me? "))
    return before + question


def _named(rng: Random, *names: str) -> str:
    """One of the names, or sometimes an invented one, which the model has to copy."""
    if rng.random() < 0.85:
        return rng.choice(names)
    parts = ["".join(rng.choice(SYLLABLES) for _ in range(2)) for _ in range(rng.randint(1, 2))]
    return "_".join(parts)


def _number(rng: Random) -> int:
    return rng.randrange(10 ** rng.randint(1, 4))


def _calculator(rng: Random) -> tuple[Tool, str, str, str]:
    a, b = _number(rng), _number(rng)
    word, sign = rng.choice(sorted(_SIGNS.items()))
    argument = _named(rng, "expression", "expression", "formula", "expr", "input")
    tool = Tool(
        _named(rng, "calculate", "calculate", "calculator", "compute", "evaluate", "math"),
        rng.choice(
            (
                "Calculates an expression.",
                "Evaluate an arithmetic expression.",
                "Returns the value of an expression.",
                "A calculator.",
                "Does arithmetic.",
            )
        ),
        {argument: f"{a} {sign} {b}"},
    )
    asked = rng.choice(
        (
            f"What is {a} {word} {b}?",
            f"What is {a} {word} {b}?",
            f"What is {a} {sign} {b}?",
            f"How much is {a} {word} {b}?",
            f"Calculate {a} {word} {b}.",
            f"{a} {sign} {b} = ?",
        )
    )
    value = {"+": a + b, "-": a - b, "*": a * b, "/": round(a / max(b, 1), 2)}[sign]
    result = rng.choice((f"{value}", f"{value}", f'{{"result": {value}}}'))
    return tool, asked, result, f"{a} {word} {b} is {value}."


def _two_numbers(rng: Random) -> tuple[Tool, str, str, str]:
    """A function with two arguments."""
    a, b = _number(rng), _number(rng)
    name, word, value = rng.choice(
        (("add", "plus", a + b), ("subtract", "minus", a - b), ("multiply", "times", a * b))
    )
    first, second = rng.choice((("a", "b"), ("a", "b"), ("x", "y"), ("first", "second")))
    tool = Tool(
        _named(rng, name, name, f"{name}_numbers"),
        f"{name.title()}s two numbers.",
        {first: a, second: b},
    )
    asked = rng.choice((f"What is {a} {word} {b}?", f"How much is {a} {word} {b}?"))
    return tool, asked, f"{value}", f"{a} {word} {b} is {value}."


def _weather(rng: Random) -> tuple[Tool, str, str, str]:
    city, kind, degrees = rng.choice(CITIES), rng.choice(WEATHER), rng.randint(-9, 39)
    tool = Tool(
        _named(rng, "get_weather", "get_weather", "weather", "get_current_weather"),
        rng.choice(
            (
                "Returns the weather in a city.",
                "Get the current weather.",
                "Get the weather for a location.",
                "The weather of a place.",
            )
        ),
        {_named(rng, "city", "city", "location", "place"): city},
    )
    asked = rng.choice(
        (
            f"What is the weather in {city}?",
            f"What is the weather like in {city}?",
            f"How is the weather in {city}?",
            f"What is the weather in {city} today?",
        )
    )
    result, answer = rng.choice(
        (
            (kind, f"The weather in {city} is {kind}."),
            (f"{kind}, {degrees} degrees", f"The weather in {city} is {kind}, {degrees} degrees."),
            (f'{{"weather": "{kind}"}}', f"The weather in {city} is {kind}."),
            (f"{degrees}", f"It is {degrees} degrees in {city}."),
        )
    )
    return tool, asked, result, answer


def _time(rng: Random) -> tuple[Tool, str, str, str]:
    city, now = rng.choice(CITIES), f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"
    tool = Tool(
        _named(rng, "get_time", "current_time", "time_in", "clock"),
        rng.choice(("Returns the time in a city.", "Get the current time.", "Tells the time.")),
        {_named(rng, "city", "city", "place", "timezone"): city},
    )
    asked = rng.choice((f"What time is it in {city}?", f"Tell me the time in {city}."))
    return tool, asked, now, f"It is {now} in {city}."


def _price(rng: Random) -> tuple[Tool, str, str, str]:
    thing, price = rng.choice(THINGS), rng.randint(1, 99)
    tool = Tool(
        _named(rng, "get_price", "price", "price_of", "look_up_price"),
        rng.choice(("Returns the price of a thing.", "Get a price.", "Looks up a price.")),
        {_named(rng, "item", "product", "name", "thing"): thing},
    )
    asked = rng.choice((f"How much are {thing}?", f"What is the price of {thing}?"))
    return tool, asked, f"{price}", f"The price of {thing} is {price}."


def _search(rng: Random) -> tuple[Tool, str, str, str]:
    topic, pages = rng.choice(UNKNOWN_TOPICS), rng.randint(2, 999)
    tool = Tool(
        _named(rng, "search", "web_search", "look_up", "lookup", "find"),
        rng.choice(("Searches the web.", "Look something up.", "Finds pages about a topic.")),
        {_named(rng, "query", "query", "topic", "q", "text"): topic},
    )
    asked = rng.choice((f"Search for {topic}.", f"Look up {topic}.", f"Find out about {topic}."))
    return tool, asked, f"{pages} pages", f"I found {pages} pages about {topic}."


_KINDS: tuple[Kind, ...] = (_calculator, _two_numbers, _weather, _time, _price, _search)
# How often a conversation is about each of them.
_WEIGHTS = (8, 3, 6, 3, 3, 4)
