"""Generates the training documents of the demo model: stories, conversations about them, small
talk, facts, sums and calls of functions.

A document is text with the markers of the tokenizer: <s> begins a document, and </s> ends a story
or a turn of a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from random import Random

from demo_stories import ANIMALS, Story, story
from demo_talk import (
    SYSTEM_PROMPTS,
    Pair,
    any_name,
    arithmetic,
    as_typed,
    colored_thing,
    fact,
    introduction,
    talk,
    unknown,
)
from demo_tools import tool_use

LINE_END = "\n"


def documents(seed: int, split: str) -> Iterator[str]:
    """Yields documents without end. Each document has its own random state, so two splits share
    documents by chance only.
    """
    for index in count():
        yield document(Random(f"{seed}/{split}/{index}"))


def sample(seed: int, split: str, size: int) -> list[str]:
    """Returns the first `size` documents of a split."""
    return list(islice(documents(seed, split), size))


def document(rng: Random) -> str:
    """Returns one document of a random kind."""
    kinds: tuple[Callable[[Random], str], ...] = (
        _tale,
        _about_a_story,
        _storytelling,
        _talk,
        _plain,
        _collection,
        _sums,
        tool_use,
    )
    return rng.choices(kinds, weights=(13, 14, 8, 22, 3, 1, 8, 31))[0](rng)


def conversation(rng: Random, turns: Sequence[Pair]) -> str:
    """Formats the turns as the chat template does. Sometimes returns only the first turn, as plain
    text without the template.
    """
    if rng.random() < 0.2:
        asked, answer = turns[0]
        return f"<s>{asked}{rng.choice((' ', LINE_END))}{answer}</s>"
    system = f"<|system|>{rng.choice(SYSTEM_PROMPTS)}</s>" if rng.random() < 0.25 else ""
    return (
        "<s>"
        + system
        + "".join(f"<|user|>{asked}</s><|assistant|>{answer}</s>" for asked, answer in turns)
    )


def _tale(rng: Random) -> str:
    return f"<s>{story(rng).text}</s>"


def _about_a_story(rng: Random) -> str:
    """A story and a few questions about it. The first question is in the same turn as the story."""
    told = story(rng)
    first, *others = _questions(rng, told, rng.randint(1, 4))
    frame = rng.choice(
        (
            "{story} {ask}",
            "{story}\n{ask}",
            "{story}\n\n{ask}",
            "{ask}\n\n{story}",
            "Here is a story. {story}\n\n{ask}",
            "Read this story:\n\n{story}\n\nQuestion: {ask}",
        )
    )
    turns = [(frame.format(story=told.text, ask=first[0]), first[1]), *others]
    return conversation(rng, turns)


def _storytelling(rng: Random) -> str:
    """The user asks for a story and may ask questions about it."""
    wish = rng.choice(("any", "kind", "name", "topic"))
    kind = rng.choice(ANIMALS) if wish in ("kind", "name") else None
    hero = any_name(rng) if wish == "name" else None
    told = story(rng, kind=kind, hero=hero)
    about = {
        "any": "",
        "kind": f" about a {kind}",
        "name": f" about a {kind} named {hero}",
        "topic": f" about {told.topic}",
    }[wish]
    ask = rng.choice(
        (
            "Tell me a story{}.",
            "Tell me a short story{}.",
            "Write a story{}.",
            "Can you tell me a story{}?",
            "Please tell me a story{}!",
            "Write a short story{}.",
            "tell me a story{}",
        )
    )
    return conversation(
        rng, [(ask.format(about), told.text), *_questions(rng, told, rng.randint(0, 2))]
    )


def _talk(rng: Random) -> str:
    """A conversation about various topics."""
    sources = (talk, fact, arithmetic, unknown, colored_thing)
    pairs = [
        rng.choices(sources, weights=(30, 35, 12, 12, 11))[0](rng) for _ in range(rng.randint(1, 5))
    ]
    turns = [(as_typed(rng, asked), answer) for asked, answer in pairs]
    if rng.random() < 0.2:
        named, asked = introduction(rng)
        turns = [named, *turns[:2], asked]
    return conversation(rng, turns)


def _sums(rng: Random) -> str:
    """A conversation about sums only."""
    turns = [arithmetic(rng) for _ in range(rng.randint(2, 6))]
    return conversation(rng, [(as_typed(rng, asked), answer) for asked, answer in turns])


def _plain(rng: Random) -> str:
    """Facts and sums as plain text."""
    sentences = [
        rng.choice((fact, arithmetic, arithmetic))(rng)[1] for _ in range(rng.randint(3, 12))
    ]
    return f"<s>{' '.join(sentences)}</s>"


def _collection(rng: Random) -> str:
    """A long document: several stories with different heroes, then questions about some of them."""
    tales: list[Story] = []
    avoid: set[str] = set()
    for _ in range(rng.choice((2, 2, 2, 3, 3, 4, 5, 6, 10, 24))):
        tales.append(story(rng, avoid=avoid))
        avoid |= {tales[-1].hero, tales[-1].friend}
    body = "\n\n".join(f"Story {number}. {told.text}" for number, told in enumerate(tales, 1))
    if rng.random() < 0.3:
        return f"<s>{body}</s>"
    turns = [_named_question(rng, rng.choice(tales)) for _ in range(rng.randint(1, 4))]
    return conversation(rng, [(f"{body}\n\n{turns[0][0]}", turns[0][1]), *turns[1:]])


def _questions(rng: Random, told: Story, number: int) -> list[Pair]:
    return [(as_typed(rng, asked), answer) for asked, answer in rng.sample(told.answers, number)]


def _named_question(rng: Random, told: Story) -> Pair:
    """A question that identifies its story by a name."""
    return rng.choice(
        [pair for pair in told.answers if told.hero in pair[0] or told.friend in pair[0]]
    )
