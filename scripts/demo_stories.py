"""A grammar of short stories. The characters, places and things of a story stay the same, and the
grammar has questions about them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from random import Random

from demo_plots import PLOTS, Plot, words

GIRLS = words(
    "Lily Mia Anna Emma Zoe Nora Ruby Ella Clara Ivy Rosa Luna Maya Sara Hana Nina "
    "Alice Olga Tina Lucy Amy Eva Kira Jana Vera Wanda Yara Sofia"
)
BOYS = words(
    "Tom Ben Sam Max Leo Oscar Finn Jack Hugo Milo Theo Noah Omar Ravi Felix Paul "
    "Alex Bruno Carl David Erik Henry Ivan Luca Peter Simon Tim Will"
)
NAMES = GIRLS + BOYS
ANIMALS = words(
    "fox cat dog bear rabbit mouse wolf frog duck hedgehog turtle "
    "squirrel bird horse sheep pig goat hen deer monkey lion tiger dragon penguin"
)
TRAITS = words("brave kind clever shy cheerful curious gentle quiet funny friendly")
COLORS = words("red blue green yellow white black brown pink golden silver")
HOMES = (
    "a small house by the river",
    "a warm cave under the hill",
    "a tree house in the forest",
    "a little village near the sea",
    "a barn at the end of the road",
    "a garden behind the school",
    "a cottage with a green door",
    "an old mill on the hill",
    "a quiet valley between two mountains",
    "a tall tower near the lake",
)
OPENINGS = (
    "Once upon a time there was a {trait} little {kind} named {hero}. {He} lived in {home}.",
    "Once upon a time, in {home}, there lived a {trait} little {kind} named {hero}.",
    "Once upon a time there lived a {trait} little {kind} in {home}. {His} name was {hero}.",
    "Once upon a time a {trait} little {kind} named {hero} lived in {home}.",
    "There was once a {trait} little {kind} named {hero}, who lived in {home}.",
    "Long ago, a {trait} little {kind} named {hero} lived in {home}.",
    "{hero} was a {trait} little {kind}. {He} lived in {home}.",
)
FRIENDSHIPS = (
    "{His} best friend was a {fkind} named {friend}.",
    "{His} best friend, a {fkind} named {friend}, lived next door.",
    "{He} had a good friend, a {fkind} named {friend}.",
    "Every day {he} played with {friend}, a {fkind} who was {his} best friend.",
)
ENDINGS = (
    "From that day on, {hero} and {friend} were even better friends. The end.",
    "{hero} and {friend} laughed and went home together. The end.",
    "That night {hero} slept very well. The end.",
    "And they lived happily ever after.",
    "{hero} never forgot that day. The end.",
)
QUESTIONS = (
    ("What is the name of the {kind}?", "The name of the {kind} is {hero}."),
    ("What is the name of the {fkind}?", "The name of the {fkind} is {friend}."),
    ("What was the {kind} called?", "The {kind} was called {hero}."),
    ("Who is {hero}?", "{hero} is a {trait} little {kind}."),
    ("Who is {friend}?", "{friend} is a {fkind} and the best friend of {hero}."),
    ("Where does {hero} live?", "{hero} lives in {home}."),
    ("Where did the {kind} live?", "The {kind} lived in {home}."),
    ("Who is the best friend of {hero}?", "The best friend of {hero} is {friend}."),
    ("What animal is {hero}?", "{hero} is a {kind}."),
    ("What animal is {friend}?", "{friend} is a {fkind}."),
    ("What is {hero} like?", "{hero} is {trait}."),
    ("Is {hero} a {kind}?", "Yes, {hero} is a {kind}."),
    ("Is {hero} a {stranger}?", "No, {hero} is a {kind}."),
    ("What is the name of the {stranger}?", "There is no {stranger} in the story."),
)


@dataclass(frozen=True, slots=True)
class Story:
    """A story with questions about it."""

    text: str
    # (question, answer)
    answers: tuple[tuple[str, str], ...]
    kind: str
    hero: str
    friend: str
    topic: str


def story(
    rng: Random, *, kind: str | None = None, hero: str | None = None, avoid: Collection[str] = ()
) -> Story:
    """Returns a story without the names in `avoid`. kind, hero: kind and name of the hero;
    random if None.
    """
    plot = rng.choice(PLOTS)
    fields = _cast(rng, kind, hero, avoid) | _props(rng, plot)
    parts = [rng.choice(variants) for variants in (OPENINGS, FRIENDSHIPS, *plot.sentences, ENDINGS)]
    human = fields["kind"] in ("girl", "boy")
    asked = [pair for pair in QUESTIONS if not (human and "animal is {hero}" in pair[0])] + [
        *plot.questions
    ] * 2
    summary = ("What is the story about?", f"It is about {plot.summary}.")
    answers = tuple(
        (_fill(question, fields), _fill(answer, fields)) for question, answer in (*asked, summary)
    )
    return Story(
        text=" ".join(_fill(part, fields) for part in parts),
        answers=answers,
        kind=fields["kind"],
        hero=fields["hero"],
        friend=fields["friend"],
        topic=_fill(plot.topic, fields),
    )


def _cast(
    rng: Random, kind: str | None, hero: str | None, avoid: Collection[str]
) -> dict[str, str]:
    hero = hero or rng.choice([name for name in NAMES if name not in avoid])
    friend = rng.choice([name for name in NAMES if name not in avoid and name != hero])
    child = "girl" if hero in GIRLS else "boy"
    kind = kind or (child if rng.random() < 0.2 else rng.choice(ANIMALS))
    fkind, stranger = rng.sample([animal for animal in ANIMALS if animal != kind], 2)
    return {
        "hero": hero,
        "kind": kind,
        "trait": rng.choice(TRAITS),
        "home": rng.choice(HOMES),
        "friend": friend,
        "fkind": fkind,
        "stranger": stranger,
        **_pronouns("", hero in GIRLS),
        **_pronouns("f", friend in GIRLS),
    }


def _pronouns(prefix: str, female: bool) -> dict[str, str]:
    words = (
        {"he": "she", "him": "her", "his": "her"}
        if female
        else {"he": "he", "him": "him", "his": "his"}
    )
    return {f"{prefix}{key}": word for key, word in words.items()} | {
        f"{prefix}{key}".capitalize(): word.capitalize() for key, word in words.items()
    }


def _props(rng: Random, plot: Plot) -> dict[str, str]:
    total = rng.randint(4, 9)
    given = rng.randint(2, total - 2)
    numbers = {"total": str(total), "given": str(given), "left": str(total - given)}
    return (
        numbers
        | {"color": rng.choice(COLORS)}
        | {key: rng.choice(words) for key, words in plot.props.items()}
    )


def _fill(text: str, fields: Mapping[str, str]) -> str:
    return text.format_map(fields)
