"""The plots of the stories. Each plot has props, an ordered list of sentences with variants, and
questions.

Placeholders: the hero ({hero}, {he}, {him}, {his}), the friend ({friend}, {fhe}, {fhim}, {fhis}),
the kinds of the two ({kind}, {fkind}), a {color}, numbers ({total} = {given} + {left}), and the
plot's own props.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TOYS = words("ball kite hat cup book drum bell boat scarf lamp spoon ring")
FRUITS = words("apples pears plums cherries nuts berries carrots cookies")
PLACES = (
    "in the park",
    "in the forest",
    "in the meadow",
    "on the beach",
    "by the river",
    "on the hill",
    "at the market",
)
HIDING = (
    "under a bush",
    "behind a big stone",
    "in the tall grass",
    "under the old bridge",
    "behind the barn",
    "in a basket",
)
WEATHER = (
    "The sun was shining.",
    "It was a warm day.",
    "The wind was soft.",
    "It was a cold and bright day.",
)


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot."""

    # Completes the phrase "a story about".
    topic: str
    summary: str
    props: Mapping[str, tuple[str, ...]]
    sentences: tuple[tuple[str, ...], ...]
    questions: tuple[tuple[str, str], ...]


LOST = Plot(
    topic="a lost {toy}",
    summary="a {kind} named {hero} who loses a {color} {toy} and finds it again",
    props={"toy": TOYS, "place": PLACES, "hiding": HIDING},
    sentences=(
        (
            "{hero} had a {color} {toy}. {He} loved it very much.",
            "{hero} loved {his} {color} {toy} more than anything.",
        ),
        (
            "One day {he} played {place}, and the {toy} was gone.",
            "One morning {he} lost the {toy} {place}.",
        ),
        (
            '{He} looked here and there, but {he} could not find it. "Oh no," said {hero}.',
            "{hero} looked everywhere and began to cry.",
        ),
        (
            '"Do not be sad," said {friend}. "I will help you."',
            '{friend} came by and said, "Let us look together."',
        ),
        ("They looked for a long time.", "They looked up and they looked down."),
        (
            "At last {friend} found the {color} {toy} {hiding}.",
            "Then {friend} saw something {color} {hiding}. It was the {toy}!",
        ),
        (
            '"Thank you, {friend}!" said {hero}.',
            "{hero} was so happy that {he} gave {friend} a big hug.",
        ),
    ),
    questions=(
        ("What did {hero} lose?", "{hero} lost a {color} {toy}."),
        ("Where was the {toy}?", "The {toy} was {hiding}."),
        ("Who found the {toy}?", "{friend} found the {toy}."),
        ("What color was the {toy}?", "The {toy} was {color}."),
    ),
)

STORM = Plot(
    topic="a storm",
    summary="a {kind} named {hero} who is afraid of a storm until {friend} helps",
    props={"place": PLACES, "meal": ("soup", "bread", "tea", "milk", "porridge", "pie")},
    sentences=(
        ("One day {hero} went for a walk {place}.", "One afternoon {hero} was alone {place}."),
        (
            "Soon the sky grew dark and it began to rain.",
            "Then dark clouds came and the rain fell hard.",
        ),
        (
            "There was a loud boom. {hero} was afraid and ran as fast as {he} could.",
            "The wind blew and {hero} was cold and afraid.",
        ),
        (
            "{He} saw a light. It was the house of {friend}.",
            "Then {he} heard a voice. It was {friend}.",
        ),
        ('"Come in, come in!" said {friend}.', '"Come inside and get dry," said {friend}.'),
        (
            "{friend} gave {him} warm {meal} and a {color} blanket.",
            "They sat by the fire under a {color} blanket and had warm {meal}.",
        ),
        (
            "When the storm was over, they saw a rainbow.",
            "Soon the storm was over and the sun came out.",
        ),
        ('"I am not afraid when you are with me," said {hero}.', "{hero} was not afraid any more."),
    ),
    questions=(
        ("What was {hero} afraid of?", "{hero} was afraid of the storm."),
        ("Who helped {hero}?", "{friend} helped {hero}."),
        (
            "What did {friend} give {hero}?",
            "{friend} gave {hero} warm {meal} and a {color} blanket.",
        ),
        ("What color was the blanket?", "The blanket was {color}."),
        ("Where was {hero} when the rain came?", "{hero} was {place}."),
    ),
)

SEED = Plot(
    topic="a seed",
    summary="a {kind} named {hero} who plants a seed and waits for it to grow",
    props={
        "plant": ("sunflower", "rose", "pumpkin", "tulip", "pear tree", "apple tree"),
        "spot": (*HIDING[:2], "by the gate", "near the well", "behind the barn"),
    },
    sentences=(
        ("One spring day {hero} found a tiny seed.", "In spring {friend} gave {hero} a tiny seed."),
        (
            "{He} made a little hole {spot} and put the seed in.",
            "{He} put it into the ground {spot}.",
        ),
        ("Every day {he} gave it water.", "Every morning {he} gave it water and sang a song."),
        (
            '"Nothing grows here," said {friend}. "Wait and see," said {hero}.',
            '"When will it grow?" asked {friend}. "We must wait," said {hero}.',
        ),
        (
            "It rained, and the sun was warm, and many days went by.",
            "One week passed, and then another.",
        ),
        (
            "At last the seed grew into a beautiful {color} {plant}.",
            "Then one morning there it was: a big {color} {plant}!",
        ),
        ('"It was good to wait," said {friend}.', "{hero} and {friend} danced around it."),
    ),
    questions=(
        ("Where was the seed planted?", "The seed was planted {spot}."),
        ("What did the seed grow into?", "The seed grew into a {color} {plant}."),
        ("Who planted the seed?", "{hero} planted the seed."),
        ("What did {hero} give the seed?", "{hero} gave the seed water."),
    ),
)

CAKE = Plot(
    topic="a birthday cake",
    summary="a {kind} named {hero} who bakes a cake for the birthday of {friend}",
    props={
        "missing": ("milk", "sugar", "flour", "butter", "honey"),
        "flavor": ("lemon", "cherry", "honey", "plum", "carrot", "berry"),
        "day": ("Monday", "Tuesday", "Friday", "Sunday"),
    },
    sentences=(
        ("On {day} it was the birthday of {friend}.", "{friend} had a birthday on {day}."),
        (
            "{hero} wanted to bake a {flavor} cake.",
            '"I will bake a {flavor} cake for {fhim}," said {hero}.',
        ),
        (
            "But there was no {missing} in the kitchen.",
            "{He} looked in the kitchen, but there was no {missing}.",
        ),
        (
            "So {he} went to the market and bought some {missing}.",
            "{He} ran to the farm, and the farmer gave {him} some {missing}.",
        ),
        (
            "{He} mixed and baked, and soon the cake was ready.",
            "{hero} worked all morning, and the cake smelled very good.",
        ),
        ("{He} put a {color} candle on top.", "On top of the cake {he} put one {color} candle."),
        ('"Happy birthday, {friend}!" said {hero}.', '"Surprise!" said {hero}.'),
        (
            '"This is the best cake of all," said {friend}.',
            "{friend} smiled, and they ate the whole cake.",
        ),
    ),
    questions=(
        ("What did {hero} bake?", "{hero} baked a {flavor} cake."),
        ("Whose birthday was it?", "It was the birthday of {friend}."),
        ("What was missing in the kitchen?", "There was no {missing} in the kitchen."),
        ("What color was the candle?", "The candle was {color}."),
        ("On which day was the birthday?", "The birthday was on {day}."),
    ),
)

LEARN = Plot(
    topic="learning to {skill}",
    summary="a {kind} named {hero} who learns to {skill}",
    props={
        "skill": (
            "swim",
            "sing",
            "dance",
            "read",
            "climb trees",
            "ride a bike",
            "play the drum",
            "skate",
        ),
        "place": PLACES,
    },
    sentences=(
        (
            "{hero} wanted to {skill}, but {he} did not know how.",
            "All the others could {skill}, but {hero} could not.",
        ),
        ('"I will never learn it," said {hero}.', "{hero} was sad about it."),
        (
            '"I can teach you," said {friend}.',
            '"It is not so hard," said {friend}. "I will show you."',
        ),
        ("The next day they met {place}.", "So they went out and met {place}."),
        (
            "{hero} tried once, and it did not work. {He} tried again, and it was a little better.",
            "The first time {hero} fell down. The second time {he} laughed.",
        ),
        ("The third time {he} could {skill}!", "After many tries, {hero} could {skill} very well."),
        ('"You did it!" said {friend}.', "{friend} clapped and cheered."),
        ("{hero} was very proud.", '"I only had to try again," said {hero}.'),
    ),
    questions=(
        ("What did {hero} learn?", "{hero} learned to {skill}."),
        ("Who taught {hero}?", "{friend} taught {hero} to {skill}."),
        ("Where did they meet?", "They met {place}."),
        ("How did {hero} feel at the end?", "{hero} felt very proud."),
    ),
)

RESCUE = Plot(
    topic="a rescue",
    summary="a {kind} named {hero} who saves {friend}",
    props={
        "trap": ("a deep hole", "an old well", "a muddy ditch", "a tall tree", "a thorn bush"),
        "tool": ("rope", "ladder", "stick", "blanket", "branch"),
        "place": PLACES,
    },
    sentences=(
        (
            "One day {hero} heard a cry {place}.",
            "One morning {hero} was {place} when {he} heard a cry.",
        ),
        ('"Help! Help!" It was {friend}.', 'It was {friend}. "Please help me!" {fhe} cried.'),
        ("{friend} was stuck in {trap} and could not get out.", "{Fhe} had got stuck in {trap}."),
        ("{hero} thought for a moment. Then {he} had an idea.", '"I have an idea," said {hero}.'),
        (
            "{He} ran home and came back with a {color} {tool}.",
            "{He} looked around and found a long {color} {tool}.",
        ),
        (
            '"Hold on to it," said {hero}, and {he} pulled and pulled.',
            "{friend} held on to the {tool}, and {hero} pulled with all {his} might.",
        ),
        ("At last {friend} was free.", "Pop! {friend} was out."),
        ('"You saved me," said {friend}.', '"You are the best friend of all," said {friend}.'),
    ),
    questions=(
        ("Who was stuck?", "{friend} was stuck in {trap}."),
        ("Where was {friend} stuck?", "{friend} was stuck in {trap}."),
        ("Who saved {friend}?", "{hero} saved {friend}."),
        ("What did {hero} use?", "{hero} used a {color} {tool}."),
    ),
)

SHARE = Plot(
    topic="sharing",
    summary="a {kind} named {hero} who shares {his} {fruit} with {friend}",
    props={"fruit": FRUITS, "place": PLACES},
    sentences=(
        (
            "One day {hero} had {total} {fruit} in a {color} bag.",
            "{hero} had a {color} bag with {total} {fruit} in it.",
        ),
        WEATHER,
        ("{He} sat down {place} to eat.", "{He} went to a quiet spot {place}."),
        (
            "Then {friend} came by. {Fhe} had nothing to eat.",
            '{friend} came and said, "I am so hungry."',
        ),
        ('"You can have some of mine," said {hero}.', '"Let us share," said {hero}.'),
        (
            "{He} gave {given} {fruit} to {friend}, and {left} {fruit} were left.",
            "{hero} gave {friend} {given} {fruit} and kept {left} {fruit}.",
        ),
        (
            "They ate and talked until the sun went down.",
            "They ate together, and it was the best meal of the week.",
        ),
        ('"It tastes better with a friend," said {hero}.', '"You are very kind," said {friend}.'),
    ),
    questions=(
        ("How many {fruit} did {hero} have at first?", "{hero} had {total} {fruit} at first."),
        (
            "How many {fruit} did {hero} give to {friend}?",
            "{hero} gave {given} {fruit} to {friend}.",
        ),
        ("How many {fruit} were left?", "There were {left} {fruit} left."),
        ("What was in the bag?", "There were {total} {fruit} in the bag."),
        ("What color was the bag?", "The bag was {color}."),
    ),
)

RACE = Plot(
    topic="a race",
    summary="a race between a {kind} named {hero} and a {fkind} named {friend}",
    props={
        "goal": ("the old oak", "the bridge", "the big gate", "the windmill", "the lake"),
        "prize": TOYS,
    },
    sentences=(
        (
            '"Let us race to {goal}," said {friend}.',
            "One day {hero} and {friend} had a race to {goal}.",
        ),
        ("The prize was a {color} {prize}.", "The winner would get a {color} {prize}."),
        (
            '"One, two, three, go!" And off they ran.',
            "They ran and ran, over the grass and up the road.",
        ),
        (
            "{hero} was fast, but {friend} was faster.",
            "First {friend} was in front, and then {hero}.",
        ),
        (
            "Then {friend} fell and hurt {fhis} leg.",
            '"Ouch!" cried {friend}, who had hurt {fhis} leg.',
        ),
        (
            "{hero} could have won, but {he} stopped and went back.",
            "{hero} did not run on. {He} turned around to help.",
        ),
        ("Side by side they walked to {goal}.", "They came to {goal} hand in hand."),
        (
            "So both of them won, and they shared the {color} {prize}.",
            '"We both win," said {hero}, and they shared the {prize}.',
        ),
    ),
    questions=(
        ("Who won the race?", "{hero} and {friend} both won the race."),
        ("What was the prize?", "The prize was a {color} {prize}."),
        ("Who got hurt?", "{friend} got hurt."),
        ("Where did they race to?", "They raced to {goal}."),
    ),
)

NOISE = Plot(
    topic="a strange noise",
    summary="a {kind} named {hero} who hears a strange noise at night",
    props={
        "room": (
            "in the attic",
            "in the cellar",
            "in the kitchen",
            "behind the door",
            "under the bed",
        ),
        "source": ("clock", "music box", "kettle", "wind bell", "toy train"),
    },
    sentences=(
        ("One night {hero} could not sleep.", "It was late, and {hero} was in bed."),
        (
            "There was a strange noise {room}.",
            '"What is that?" {he} whispered. There was a noise {room}.',
        ),
        (
            "{He} was afraid to look, so {he} called {friend}.",
            "{hero} ran next door and woke {friend}.",
        ),
        (
            '"We will look together," said {friend}.',
            "{friend} took {his} hand and lit a {color} lamp.",
        ),
        ("Step by step they went closer.", "Slowly, slowly, they came nearer."),
        ("It was only an old {source}!", "And what did they find? Only an old {source}!"),
        (
            "They laughed until their bellies hurt.",
            '"How silly of us," said {hero}, and they both laughed.',
        ),
    ),
    questions=(
        ("Where was the noise?", "The noise was {room}."),
        ("What made the noise?", "An old {source} made the noise."),
        ("Who helped {hero}?", "{friend} helped {hero}."),
        ("When did {hero} hear the noise?", "{hero} heard the noise at night."),
    ),
)

PLOTS = (LOST, STORM, SEED, CAKE, LEARN, RESCUE, SHARE, RACE, NOISE)
