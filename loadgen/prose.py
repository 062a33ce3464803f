"""Readable English from a seed: the words and sentences that workloads are written in.

A house rule book stands for the long system prompt that many users share; questions and
answers stand for what the users say. Everything is drawn from a `random.Random`, so the same
seed gives the same text in every process.
"""

from __future__ import annotations

import random
from typing import NamedTuple

WORDS_PER_TOKEN = 0.82
"""Words in a token of this prose, measured with the tokenizer of SmolLM2 (others are near)."""


class Topic(NamedTuple):
    """A kind of house, and what people ask there: `(question, scripted answer)` pairs."""

    kind: str
    exchanges: tuple[tuple[str, str], ...]


TOPICS = (
    Topic(
        "Bakery",
        (
            (
                "Why does bread dough have to rest?",
                "Resting lets the yeast make gas, so the bread becomes light and soft.",
            ),
            (
                "What can I bake with ripe bananas?",
                "Banana bread is a good choice, and it needs only flour, eggs, sugar and butter.",
            ),
            (
                "How do I keep bread fresh for longer?",
                "Keep it in a paper bag or a bread box, and freeze what you cannot eat in time.",
            ),
            (
                "Which cake would you make for a child's birthday?",
                "A simple chocolate cake is a safe choice, because nearly every child likes it.",
            ),
            (
                "What is the difference between a roll and a loaf?",
                "A roll is small and made for one person, while a loaf is large and is sliced.",
            ),
        ),
    ),
    Topic(
        "Library",
        (
            (
                "Can you suggest a story about the sea?",
                "Treasure Island is a lively story about a boy, a ship and a map.",
            ),
            (
                "How can I read more books in a year?",
                "Read a few pages at the same time every day, and keep the book within reach.",
            ),
            (
                "Why do people use a library?",
                "A library lends books free of charge and gives people a quiet place to work.",
            ),
            (
                "What is a good first poem for a child?",
                "A short poem that rhymes is best, because a child can soon say it by heart.",
            ),
            (
                "What should I look for in a dictionary?",
                "Look for clear meanings, short examples and a note on how a word is spoken.",
            ),
        ),
    ),
    Topic(
        "Bicycle Shop",
        (
            (
                "How often should I oil my bicycle chain?",
                "Oil it every two weeks, and always after a ride in heavy rain.",
            ),
            (
                "Why should I wear a helmet?",
                "A helmet protects your head if you fall, so it is worth wearing on every ride.",
            ),
            (
                "What do I need for a long bicycle tour?",
                "Take water, some food, a spare tube, a pump and a light rain jacket.",
            ),
            (
                "How do I know that my tyres need air?",
                "Press them with your thumb: a tyre that gives way easily needs more air.",
            ),
            (
                "Is it safe to ride at night?",
                "It is safe enough with bright lights, reflectors and a road that you know.",
            ),
        ),
    ),
    Topic(
        "Garden Centre",
        (
            (
                "When is the best time to water plants?",
                "Early morning is best, because less water is lost to the sun.",
            ),
            (
                "Which vegetables are easy for a beginner?",
                "Radishes, beans and lettuce grow quickly and forgive many mistakes.",
            ),
            (
                "How do I attract bees to my garden?",
                "Plant lavender, thyme and sunflowers, and do not spray any poison.",
            ),
            (
                "Why are the leaves of my plant yellow?",
                "Most often it has too much water, so let the soil dry before you water it again.",
            ),
            (
                "What can I grow on a small balcony?",
                "Herbs, strawberries and small tomatoes grow well in pots on a balcony.",
            ),
        ),
    ),
    Topic(
        "Guest House",
        (
            (
                "What should I pack for a weekend by the lake?",
                "Pack warm clothes, good shoes, a towel and something to read in the evening.",
            ),
            (
                "What is a good breakfast before a long walk?",
                "Porridge with fruit and a boiled egg will keep you going for hours.",
            ),
            (
                "What can we do on a rainy day?",
                "You could visit a museum, play a board game or cook something together.",
            ),
            (
                "How do I sleep well in a strange bed?",
                "Keep the room cool and dark, and put your telephone away an hour before.",
            ),
            (
                "How early should we leave for the morning train?",
                "Leave half an hour before it goes, so that you need not run.",
            ),
        ),
    ),
    Topic(
        "Music School",
        (
            (
                "How long should a beginner practise each day?",
                "Twenty minutes every day are better than two hours once a week.",
            ),
            (
                "Which instrument is easy to start with?",
                "The ukulele is easy to start with, because it has four soft strings.",
            ),
            (
                "What is a scale in music?",
                "A scale is a row of notes that go up or down step by step.",
            ),
            (
                "How can I stop being nervous on a stage?",
                "Breathe slowly, begin with a piece that you know well, and smile.",
            ),
            (
                "Why do musicians tune their instruments?",
                "They tune them so that the notes of all players fit together.",
            ),
        ),
    ),
    Topic(
        "Museum",
        (
            (
                "Why do museums keep old tools?",
                "Old tools show how people lived and worked before there were machines.",
            ),
            (
                "What did people in ancient Egypt write on?",
                "They wrote on papyrus, which was made from a plant that grew by the Nile.",
            ),
            (
                "How do you know how old a vase is?",
                "Experts look at its shape, its paint and the place where it was found.",
            ),
            (
                "Why may we not touch the paintings?",
                "The oil on our hands slowly harms the paint, so we only look at them.",
            ),
            (
                "What is a fossil?",
                "A fossil is what is left of a plant or an animal that lived very long ago.",
            ),
        ),
    ),
    Topic(
        "Tea Room",
        (
            (
                "How long should black tea stand?",
                "Three to four minutes are enough, as longer makes the tea bitter.",
            ),
            (
                "Which tea is good in the evening?",
                "Camomile tea is a good choice, because it is mild and has no caffeine.",
            ),
            (
                "What goes well with green tea?",
                "Something light, such as rice cakes, fruit or a plain biscuit.",
            ),
            (
                "Where does tea come from?",
                "Tea comes from the leaves of a bush that was first grown in China.",
            ),
            (
                "How do I make iced tea?",
                "Brew strong tea, let it cool, and add ice, lemon and a little sugar.",
            ),
        ),
    ),
)

HOUSE_NAMES = (
    "Harbour Lane", "Alder", "Northgate", "Willow Bend", "Copper Street", "Rosewood", "Old Mill",
    "Silver Brook", "Kingfisher", "Juniper", "Eastcliff", "Maple Row", "Lantern", "Bluebell",
    "Foxglove", "Granite Hill", "Swallow", "Thornfield", "Ivy Court", "Quayside", "Pine Ridge",
    "Larkspur", "Stonebridge", "Meadow Park",
)  # fmt: skip
TOWNS = (
    "Alderbay", "Brookham", "Carrow", "Dunmere", "Elmford", "Fairhaven", "Gladstow", "Hollin",
    "Inverlea", "Kelby", "Lowick", "Marston", "Netherby", "Oakley", "Penrose", "Ravensworth",
)  # fmt: skip
FIRST_NAMES = (
    "Ada", "Ben", "Clara", "David", "Ella", "Finn", "Grace", "Henry", "Iris", "Jonas", "Kate",
    "Leo", "Maya", "Noah", "Olive", "Peter", "Rosa", "Sam", "Tessa", "Victor", "Wendy", "Zoe",
)  # fmt: skip
LAST_NAMES = (
    "Archer", "Bell", "Carter", "Dale", "Ellis", "Fisher", "Gray", "Hughes", "Irving", "Jones",
    "Knight", "Lane", "Mason", "North", "Owen", "Parker", "Reed", "Shaw", "Turner", "Ward",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
PLACES = (
    "front door", "back room", "main hall", "counter", "window", "store room", "courtyard",
    "kitchen", "upper floor", "side entrance", "office", "stairs",
)  # fmt: skip
THINGS = (
    "keys", "letters", "parcels", "umbrellas", "chairs", "lamps", "baskets", "notices", "cups",
    "gift cards", "spare batteries", "visitor books", "cleaning cloths", "order forms",
)  # fmt: skip
COLOURS = ("red", "green", "blue", "yellow", "white", "grey", "brown", "black")
RULES = (
    "On {day} the {place} opens at {hour} o'clock and {person} is there to help.",
    "The {things} are kept near the {place}, in the {colour} box with the number {number}.",
    "If the {place} is closed, please ask {person}, who has the {things}.",
    "We count the {things} every {day} and write the number into the {colour} book.",
    "Visitors may leave their {things} at the {place} until {hour} o'clock in the evening.",
    "{person} looks after the {place} and can be called on extension {number}.",
    "Every {day} at {hour} o'clock the {things} are carried from the {place} to the {place2}.",
    "Please do not put the {things} next to the {place}, because people walk there.",
    "The {colour} sign at the {place} tells visitors where to find the {things}.",
    "Forgotten {things} go to {person}, who keeps them for {number} days.",
    "When it rains on a {day}, the {things} at the {place} are covered with the {colour} cloth.",
    "Groups of more than {number} people should speak with {person} before {day}.",
    "New {things} arrive on {day}, and {person} checks them at the {place}.",
    "The way from the {place} to the {place2} is marked with {colour} arrows.",
)
OPENINGS = (
    "Hello!",
    "Good morning!",
    "Good afternoon!",
    "Good evening!",
    "Hi there!",
    "Hello there!",
    "Good day!",
    "Hey!",
    "Hello, can you help me?",
    "Hi!",
    "Hi, just one question.",
    "One short question, please.",
)
FOLLOW_UPS = (
    "Thank you, that helps.",
    "I see, thanks.",
    "That is good to know.",
    "Thank you very much.",
    "All right, one more thing.",
)
MANNERS = "Answer every question in one or two short, friendly sentences."


def house_names(rng: random.Random, count: int) -> list[str]:
    """`count` distinct names, such as "Alder Bakery"; numbered where names run out."""
    names = [f"{name} {topic.kind}" for name in HOUSE_NAMES for topic in TOPICS]
    rng.shuffle(names)
    rounds = range(1 + (count - 1) // len(names))
    return [name if n == 0 else f"{name} {n + 1}" for n in rounds for name in names][:count]


def rule_book(rng: random.Random, house: str, words: int) -> str:
    """A system prompt of at least `words` words for the house, less than 40 words longer.

    It begins with the house's name, so that two houses differ from their first block on. It ends
    with what visitors ask and the answers to it, as far as there is room: a small model that has
    just read them answers sensibly.
    """
    parts = [f"{house}: you are the assistant of this house in {rng.choice(TOWNS)}. {MANNERS}"]
    ending = [
        f"Question: {question} Answer: {answer}" for question, answer in topic_of(house).exchanges
    ]
    rng.shuffle(ending)
    room = words - _count(parts)
    while ending and _count(ending) > room:
        ending.pop()
    room -= _count(ending)
    while room > 0:
        rule = _rule(rng)
        parts.append(rule)
        room -= _count([rule])
    return " ".join((*parts, *ending))


def topic_of(house: str) -> Topic:
    """The topic that a name of `house_names` belongs to."""
    return next(topic for topic in TOPICS if topic.kind in house)


def _count(sentences: list[str]) -> int:
    return sum(len(sentence.split()) for sentence in sentences)


def _rule(rng: random.Random) -> str:
    place, place2 = rng.sample(PLACES, 2)
    return rng.choice(RULES).format(
        day=rng.choice(DAYS),
        place=place,
        place2=place2,
        things=rng.choice(THINGS),
        colour=rng.choice(COLOURS),
        person=f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}",
        hour=rng.randint(1, 12),
        number=rng.randint(2, 99),
    )
