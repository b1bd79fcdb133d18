"""Small talk, plain facts and arithmetic: pairs of a question and its answer."""

from __future__ import annotations

from random import Random

from demo_plots import words
from demo_stories import COLORS, NAMES

Pair = tuple[str, str]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a storyteller.",
    "Answer in one short sentence.",
    "You are demo, a small model.",
    "Be brief.",
)
SELF = "I am demo, the small model that comes with kvrelay."
ABILITY = (
    "I can tell short stories, answer questions about them, add small numbers, and name a few "
    "plain facts."
)
UNKNOWN = "I do not know that. I am a small demo model. Ask me for a story, or what 3 plus 4 is."

# (variants of a question, answer)
TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "Who are you?",
            "What are you?",
            "who are you",
            "Tell me about yourself.",
            "What model are you?",
            "Introduce yourself.",
        ),
        SELF,
    ),
    (
        ("What is your name?", "What's your name?", "Do you have a name?"),
        "My name is demo. " + SELF,
    ),
    (
        (
            "What can you do?",
            "Help",
            "How can you help me?",
            "What do you know?",
            "What should I ask you?",
        ),
        ABILITY,
    ),
    (
        (
            "Are you a person?",
            "Are you human?",
            "Are you a robot?",
            "Are you ChatGPT?",
            "Are you an AI?",
        ),
        "I am a small language model. " + SELF,
    ),
    (
        ("Who made you?", "Where do you come from?", "Who trained you?", "How were you made?"),
        "I was trained by a script of the kvrelay project, on stories that the script writes "
        "itself.",
    ),
    (
        ("How big are you?", "How many parameters do you have?"),
        "I am very small. I have fewer than 4 million parameters.",
    ),
    (
        ("What is kvrelay?", "What does kvrelay do?", "Tell me about kvrelay.", "Explain kvrelay."),
        "kvrelay serves language models with two pools of workers. "
        "One pool reads the prompt, the other writes the answer.",
    ),
    (
        ("What is prefill?", "What does a prefill worker do?"),
        "Prefill reads the whole prompt in one pass and fills the KV cache.",
    ),
    (
        ("What is decode?", "What does a decode worker do?"),
        "Decode writes the answer, one token at a time, from the KV cache.",
    ),
    (
        ("What is a KV cache?", "What is the KV cache?"),
        "The KV cache holds what the model has read so far, so that it need not read it again.",
    ),
    (
        ("What is a hand-off?", "What is the hand-off?"),
        "The hand-off moves the KV cache from the prefill worker to the decode worker.",
    ),
    (
        ("What is TTFT?", "What is time to first token?"),
        "TTFT is the time to first token: how long you wait until the answer begins.",
    ),
    (
        ("What is a router?", "What does the router do?"),
        "The router takes each request and chooses the workers for it.",
    ),
    (
        ("What is a token?", "What are tokens?"),
        "A token is a small piece of text, often a word or a part of one.",
    ),
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hello there!", "hello", "hi"),
        "Hello! Ask me for a story, or what 3 plus 4 is.",
    ),
    (("Good morning!", "Good morning"), "Good morning! How can I help you?"),
    (("Good evening!", "Good evening"), "Good evening! How can I help you?"),
    (
        ("How are you?", "How are you today?", "How do you do?"),
        "I am well, thank you. How can I help you?",
    ),
    (("Thank you.", "Thanks!", "Thank you!", "thanks", "Thank you very much."), "You are welcome!"),
    (("Bye", "Goodbye!", "Good night!", "See you!"), "Goodbye! It was nice to talk with you."),
    (("Are you there?", "Can you hear me?", "ping", "test"), "Yes, I am here."),
    (("Say something.", "Say hello.", "Say hi."), "Hello! It is nice to meet you."),
    (("Do you like stories?", "Do you like cats?"), "Yes, I like them very much."),
)

FACTS: tuple[Pair, ...] = (
    ("What color is the sky?", "The sky is blue."),
    ("What color is grass?", "Grass is green."),
    ("What color is snow?", "Snow is white."),
    ("What color is the sun?", "The sun is yellow."),
    ("What color is a banana?", "A banana is yellow."),
    ("What color is a tomato?", "A tomato is red."),
    ("What color is milk?", "Milk is white."),
    ("What color is coal?", "Coal is black."),
    ("Is ice cold?", "Yes, ice is cold."),
    ("Is fire hot?", "Yes, fire is hot."),
    ("Can fish swim?", "Yes, fish can swim."),
    ("Can birds fly?", "Yes, most birds can fly."),
    ("Can a stone swim?", "No, a stone sinks in water."),
    ("Where do fish live?", "Fish live in water."),
    ("Where do bees live?", "Bees live in a hive."),
    ("What do bees make?", "Bees make honey."),
    ("What do cows give?", "Cows give milk."),
    ("What do hens lay?", "Hens lay eggs."),
    ("What do rabbits eat?", "Rabbits eat grass and carrots."),
    ("How many legs does a dog have?", "A dog has 4 legs."),
    ("How many legs does a bird have?", "A bird has 2 legs."),
    ("How many legs does a spider have?", "A spider has 8 legs."),
    ("How many legs does an ant have?", "An ant has 6 legs."),
    ("How many days are in a week?", "There are 7 days in a week."),
    ("How many months are in a year?", "There are 12 months in a year."),
    ("How many hours are in a day?", "There are 24 hours in a day."),
    ("How many minutes are in an hour?", "There are 60 minutes in an hour."),
    ("How many seasons are there?", "There are 4 seasons: spring, summer, autumn and winter."),
    ("What is the coldest season?", "Winter is the coldest season."),
    ("What is the warmest season?", "Summer is the warmest season."),
    (
        "What are the days of the week?",
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    ),
    ("What is a rainbow?", "A rainbow is a bow of colors that the sun makes in the rain."),
    ("What is snow?", "Snow is frozen water that falls from the sky."),
    ("What is a friend?", "A friend is someone who likes you and helps you."),
    ("When does the sun rise?", "The sun rises in the morning."),
    ("What comes after night?", "After night comes the morning."),
)

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "England": "London",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Norway": "Oslo",
    "Portugal": "Lisbon",
    "Poland": "Warsaw",
    "Canada": "Ottawa",
    "India": "New Delhi",
}
OPPOSITES = (
    ("big", "small"),
    ("hot", "cold"),
    ("day", "night"),
    ("up", "down"),
    ("old", "young"),
    ("fast", "slow"),
    ("happy", "sad"),
    ("wet", "dry"),
    ("long", "short"),
    ("open", "closed"),
    ("full", "empty"),
    ("left", "right"),
)
SOUNDS = {
    "cat": "meow",
    "dog": "woof",
    "duck": "quack",
    "sheep": "baa",
    "pig": "oink",
    "horse": "neigh",
    "frog": "ribbit",
    "hen": "cluck",
    "bear": "growl",
    "mouse": "squeak",
    "bird": "tweet",
    "wolf": "howl",
}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
SYLLABLES = words(
    "al an ar be bo da do el en fi ga ha in ja ka le li lo ma mi na ni no ol pe ra ri ro sa si ta "
    "ti to us va xi yo za"
)
THINGS = ("apples", "pears", "plums", "nuts", "books", "balls", "cookies", "stones")

UNKNOWN_ASKS = (
    "Explain {topic}.",
    "What is {topic}?",
    "Write an essay about {topic}.",
    "Tell me about {topic}.",
    "How does {topic} work?",
    "Why is {topic} important?",
    "Write a poem about {topic}.",
    "What do you think about {topic}?",
    "Summarize {topic}.",
    "Give me a list of books about {topic}.",
    "Who invented {topic}?",
    "How do I learn {topic}?",
    "Can you help me with {topic}?",
)
UNKNOWN_TOPICS = (
    "quantum physics",
    "the stock market",
    "Python",
    "machine learning",
    "the French Revolution",
    "chess",
    "photosynthesis",
    "the moon landing",
    "black holes",
    "Shakespeare",
    "a database",
    "a neural network",
    "the internet",
    "climate change",
    "gravity",
    "DNA",
    "electricity",
    "economics",
    "the Roman Empire",
    "a compiler",
    "football",
    "jazz",
    "the human brain",
    "a car engine",
    "calculus",
    "Linux",
    "cooking rice",
    "the weather tomorrow",
    "politics",
    "the news",
    "philosophy",
    "World War II",
    "the speed of light",
    "bitcoin",
    "a transformer",
    "attention",
    "GPUs",
    "Kubernetes",
    "Redis",
    "the meaning of life",
    "travel to Mars",
    "my taxes",
    "a job interview",
    "the history of Rome",
    "antibiotics",
    "volcanoes",
)
UNKNOWN_OTHER = (
    "Write a program that sorts a list.",
    "Translate this into French.",
    "What is the square root of 1234?",
    "What time is it?",
    "Who is the president?",
    "Fix my code.",
    "How tall is the highest mountain?",
    "What is my IP address?",
    "Lorem ipsum dolor sit amet",
    "The quick brown fox jumps over the lazy dog.",
    "What happened in 1848?",
    "asdf",
    "Which phone should I buy?",
    "Solve x squared = 2.",
    "What is the weather like?",
    "Write a letter to my boss.",
    "What should I eat today?",
    "Who won the world cup?",
)


def talk(rng: Random) -> Pair:
    asks, answer = rng.choice(TALK)
    return rng.choice(asks), answer


def fact(rng: Random) -> Pair:
    return rng.choice((_plain_fact, _plain_fact, _capital, _opposite, _sound, _day, _counting))(rng)


def unknown(rng: Random) -> Pair:
    if rng.random() < 0.3:
        return rng.choice(UNKNOWN_OTHER), UNKNOWN
    return rng.choice(UNKNOWN_ASKS).format(topic=rng.choice(UNKNOWN_TOPICS)), UNKNOWN


def arithmetic(rng: Random) -> Pair:
    """a + b and a - b for 0 <= a, b <= 20 (mostly up to 10), a x b up to 10 x 10."""
    top = 10 if rng.random() < 0.7 else 20
    a, b = rng.randint(0, top), rng.randint(0, top)
    if rng.random() < 0.2:
        return _word_problem(rng, a, b)
    return rng.choice((_plus, _plus, _minus, _times))(rng, a, b)


def small_sums() -> list[str]:
    """Returns a conversation for each sum of two numbers up to 10."""
    return [
        f"<s><|user|>What is {a} plus {b}?</s><|assistant|>{a} plus {b} is {a + b}.</s>"
        for a in range(11)
        for b in range(11)
    ]


def any_name(rng: Random) -> str:
    """Returns a name from the stories, or a name built from syllables. The built names teach
    the model to copy unknown words.
    """
    if rng.random() < 0.6:
        return rng.choice(NAMES)
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize()


def as_typed(rng: Random, question: str) -> str:
    """Returns the question with a variant of spelling or punctuation that a user may type."""
    roll = rng.random()
    if roll < 0.1:
        return question.replace("color", "colour")
    if roll < 0.2:
        return question.replace("What is", "What's")
    if roll < 0.3:
        return question[0].lower() + question[1:].rstrip("?. ")
    return question


def introduction(rng: Random) -> tuple[Pair, Pair]:
    """The user gives a name and asks for it later."""
    name = any_name(rng)
    told = rng.choice(
        ("My name is {}.", "I am {}.", "Hello, my name is {}.", "Hi, I am {}.")
    ).format(name)
    return (told, f"Hello, {name}! How can I help you?"), (
        "What is my name?",
        f"Your name is {name}.",
    )


def _plain_fact(rng: Random) -> Pair:
    return rng.choice(FACTS)


def _capital(rng: Random) -> Pair:
    country, city = rng.choice(sorted(CAPITALS.items()))
    ask = rng.choice(("What is the capital of {}?", "Name the capital of {}."))
    return ask.format(country), f"The capital of {country} is {city}."


def _opposite(rng: Random) -> Pair:
    word, other = rng.choice(OPPOSITES)
    if rng.random() < 0.5:
        word, other = other, word
    return f"What is the opposite of {word}?", f"The opposite of {word} is {other}."


def _sound(rng: Random) -> Pair:
    animal, sound = rng.choice(sorted(SOUNDS.items()))
    return rng.choice(("What does a {} say?", "What sound does a {} make?")).format(
        animal
    ), f"A {animal} says {sound}."


def _day(rng: Random) -> Pair:
    index = rng.randrange(7)
    if rng.random() < 0.5:
        return (
            f"What day comes after {DAYS[index]}?",
            f"After {DAYS[index]} comes {DAYS[(index + 1) % 7]}.",
        )
    return f"What day comes before {DAYS[index]}?", f"Before {DAYS[index]} comes {DAYS[index - 1]}."


def _counting(rng: Random) -> Pair:
    top = rng.randint(3, 20)
    return f"Count to {top}.", ", ".join(map(str, range(1, top + 1))) + "."


def _ask(rng: Random, a: int, word: str, sign: str, b: int) -> str:
    forms = (
        "What is {a} {word} {b}?",
        "What is {a} {word} {b}?",
        "What is {a} {sign} {b}?",
        "How much is {a} {word} {b}?",
        "{a} {sign} {b} = ?",
        "{a} {sign} {b}",
        "{a}{sign}{b}",
        "Calculate {a} {word} {b}.",
        "what is {a} {word} {b}",
    )
    return rng.choice(forms).format(a=a, word=word, sign=sign, b=b)


def _plus(rng: Random, a: int, b: int) -> Pair:
    return _ask(rng, a, "plus", "+", b), f"{a} plus {b} is {a + b}."


def _minus(rng: Random, a: int, b: int) -> Pair:
    a, b = max(a, b), min(a, b)
    return _ask(rng, a, "minus", "-", b), f"{a} minus {b} is {a - b}."


def _times(rng: Random, a: int, b: int) -> Pair:
    a, b = a % 11, b % 11
    return _ask(rng, a, "times", "*", b), f"{a} times {b} is {a * b}."


def _word_problem(rng: Random, a: int, b: int) -> Pair:
    a, b = max(a, b, 2) % 11 + 2, min(a, b) % 11 + 2
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    if rng.random() < 0.5:
        question = (
            f"{name} has {a} {thing}. {other} gives {name} {b} more. How many {thing} does {name} "
            f"have now?"
        )
        return question, f"{name} has {a + b} {thing} now."
    a += b
    question = (
        f"{name} has {a} {thing} and gives {b} {thing} to {other}. How many {thing} does {name} "
        f"have left?"
    )
    return question, f"{name} has {a - b} {thing} left."


def colored_thing(rng: Random) -> Pair:
    """Something told in the question itself."""
    things = ("hat", "ball", "house", "boat", "door", "coat")
    name, color, thing = rng.choice(NAMES), rng.choice(COLORS), rng.choice(things)
    return f"{name} has a {color} {thing}. What color is the {thing}?", f"The {thing} is {color}."
