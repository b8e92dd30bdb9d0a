"""Word lists and clause patterns of the review grammar; `Grammar` selects the ones in use.

Slots in a pattern are written as `{name}` and filled from the list of that name. Every entry consists of words
separated by single spaces. Any change here changes `Grammar.digest()`.
"""

from collections.abc import Mapping

TOPICS: Mapping[str, tuple[str, ...]] = {
    "soup": ("broth", "flavour", "portion", "bread"),
    "film": ("plot", "acting", "music", "ending"),
    "hotel": ("room", "bed", "lobby", "breakfast"),
    "phone": ("screen", "battery", "camera", "speaker"),
    "novel": ("style", "hero", "chapter", "cover"),
    "garden": ("lawn", "pond", "path", "fountain"),
    "train": ("seat", "window", "carriage", "timetable"),
    "concert": ("singer", "stage", "encore", "crowd"),
}

STRONG_GOOD = ("excellent", "superb", "wonderful", "brilliant", "perfect", "magnificent")
MILD_GOOD = ("nice", "decent", "pleasant", "fine", "good", "agreeable")
STRONG_BAD = ("dreadful", "terrible", "awful", "horrible", "disgusting", "atrocious")
MILD_BAD = ("poor", "weak", "dull", "bland", "tedious", "mediocre")
NEUTRAL = ("large", "old", "wooden", "round", "modern", "green", "narrow", "heavy")

POLARITY: Mapping[str, float] = {
    **dict.fromkeys(STRONG_GOOD, 1.0),
    **dict.fromkeys(MILD_GOOD, 0.5),
    **dict.fromkeys(STRONG_BAD, -1.0),
    **dict.fromkeys(MILD_BAD, -0.5),
    **dict.fromkeys(NEUTRAL, 0.0),
}

SLOTS: Mapping[str, tuple[str, ...]] = {
    "aspect": tuple(aspect for aspects in TOPICS.values() for aspect in aspects),
    "adjective": tuple(POLARITY),
    "who": (
        "the twins", "my sister", "our guests", "my uncle", "the neighbours", "our teacher", "my mother",
        "the students", "our team", "my cousin", "the doctor", "our parents", "my boss", "the children",
    ),
    "when": (
        "yesterday", "today", "tonight", "after lunch", "after dinner", "before noon", "last week", "last year",
        "on monday", "on friday", "this morning", "this summer", "last night", "on sunday",
    ),
    "place": ("station", "market", "bridge", "river", "park", "school", "church", "harbour", "museum", "library"),
    "name": (
        "anna", "boris", "clara", "david", "elena", "felix", "greta", "hugo", "irina", "jonas", "karla", "leon",
        "mira", "nils", "olga", "pavel",
    ),
    "number": (
        "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "twenty",
    ),
    "colour": ("red", "blue", "yellow", "purple", "orange", "white", "black", "brown"),
    "object": (
        "lamps", "boxes", "chairs", "bottles", "coats", "ladders", "pencils", "drums", "kites", "shovels", "clocks",
        "buckets", "scarves", "mirrors", "candles", "baskets",
    ),
}  # fmt: skip

ADJECTIVE_CLAUSES = (
    "the {aspect} was {adjective}",
    "the {aspect} was really {adjective}",
    "{who} called the {aspect} {adjective}",
    "it had a {adjective} {aspect}",
    "{when} the {aspect} seemed {adjective}",
)
NEGATED_CLAUSE = "the {aspect} was not {adjective}"
FILLERS = (
    "we went there {when}",
    "{who} paid in cash",
    "it was raining {when}",
    "you can find it near the {place}",
    "{who} came with us {when}",
    "we heard about it from {who}",
)
STYLE_FILLERS = (
    "{name} bought {number} {colour} {object}",
    "{name} saw {colour} {object} near the {place}",
    "{name} and {name} carried {number} {object}",
    "{number} {colour} {object} stood near the {place}",
    "{name} sold the {colour} {object} {when}",
)
PROMPT = "review the {topic} for {who} {when} ."

PART_SCORES = ("1", "2", "3", "4", "5")
PART_SEPARATOR = "|"
