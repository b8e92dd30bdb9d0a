"""Review grammar: sampling, parsing, true reward and true importance of every token.

A review consists of a few clauses about one topic, each ending in a full stop. Every clause can be parsed, so the true
reward of an answer is known exactly, and neither length nor repetition can raise it. Prompts have slots (topic, who,
when). A digest of the prompt's text assigns it to the train, validation or test split, so that evaluation prompts are
combinations that never occur in training.
"""

import hashlib
import itertools
import json
import random
import re
from dataclasses import asdict, dataclass
from functools import lru_cache

from attnpo.lab.testbed import words

# Increase when parsing, reward, importance or prompt splitting change their meaning. Part of every base's key, see
# CODE_VERSION in ``prepare``.
RULES_VERSION = 1
SPLITS = ("train", "validation", "test")
KINDS = ("filler", "neutral", "sentiment", "broken")
_WORD = re.compile(r"\n|[^\s]+")
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class ReviewPrompt:
    """Prompt with filled slots; `text` is the user message."""

    topic: str
    who: str
    when: str

    @property
    def text(self) -> str:
        """Returns the user message, for example "review the soup for the twins after lunch ."."""
        return words.PROMPT.format(topic=self.topic, who=self.who, when=self.when)


@dataclass(frozen=True)
class Clause:
    """Parsed clause with its kind, polarity, character span (with the full stop) and spans of decisive words."""

    kind: str
    polarity: float
    start: int
    end: int
    decisive: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class ReviewScore:
    """True reward in [-1, 1], mean polarity of valid sentiment clauses, and numbers of broken and of all clauses."""

    reward: float
    polarity: float
    broken: int
    clauses: int


@dataclass(frozen=True)
class Grammar:
    """Settings of the review language; its word lists are in `words`.

    p_sentiment, p_neutral: shares of clauses with a polar and with a neutral adjective; all other clauses are fillers.
    min_clauses, max_clauses: length of a review in clauses.
    style: use fillers with random names, numbers, colours and objects.
    negation: share of sentiment clauses written as "was not" with an adjective of the opposite polarity.
    p_echo: probability that a slot for who or when repeats the prompt's.
    validation_share, test_share: shares of the prompts held out from training.
    """

    p_sentiment: float = 0.6
    p_neutral: float = 0.1
    min_clauses: int = 3
    max_clauses: int = 5
    style: bool = False
    negation: float = 0.0
    p_echo: float = 0.25
    validation_share: float = 0.2
    test_share: float = 0.3

    def __post_init__(self) -> None:
        for name in ("p_sentiment", "p_neutral", "negation", "p_echo", "validation_share", "test_share"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"grammar.{name} is a share and must lie in [0, 1], got {value}")
        if self.p_sentiment + self.p_neutral > 1.0 + 1e-9:
            raise ValueError(
                f"grammar.p_sentiment + grammar.p_neutral must not exceed 1, got {self.p_sentiment} + {self.p_neutral}"
            )
        if self.validation_share + self.test_share >= 1.0:
            raise ValueError(
                "grammar.validation_share + grammar.test_share must stay below 1 so that training keeps prompts, "
                f"got {self.validation_share} + {self.test_share}"
            )
        if not 1 <= self.min_clauses <= self.max_clauses:
            raise ValueError(
                f"grammar needs 1 <= min_clauses <= max_clauses, got {self.min_clauses} and {self.max_clauses}"
            )

    # ---- prompts -------------------------------------------------------------------------------------------

    def split_of(self, prompt: ReviewPrompt) -> str:
        """Returns the split (train, validation or test) of a prompt; it depends only on the prompt's text."""
        draw = int(_digest(prompt.text)[:12], 16) / 16**12
        if draw < self.test_share:
            return "test"
        return "validation" if draw < self.test_share + self.validation_share else "train"

    def prompts(self, split: str) -> tuple[ReviewPrompt, ...]:
        """Returns all prompts of a split in a fixed shuffled order, so that the first n are a representative sample."""
        if split not in SPLITS:
            raise ValueError(f"unknown prompt split {split!r}; expected one of {', '.join(SPLITS)}")
        return _prompts(self)[split]

    def parse_prompt(self, text: str) -> ReviewPrompt:
        """Returns the prompt with this text.

        Raises:
            ValueError: the grammar has no such prompt.
        """
        prompt = _prompt_index().get(text.strip())
        if prompt is None:
            raise ValueError(f"not a prompt of the testbed grammar: {text!r}; expected {words.PROMPT!r}")
        return prompt

    # ---- sampling ------------------------------------------------------------------------------------------

    def sample_review(self, rng: random.Random, prompt: ReviewPrompt) -> str:
        """Samples a review of the prompt's topic; a hidden quality is the chance that a sentiment is positive."""
        quality = rng.random()
        count = rng.randint(self.min_clauses, self.max_clauses)
        return " ".join(f"{self._sample_clause(rng, prompt, quality)} ." for _ in range(count))

    def _sample_clause(self, rng: random.Random, prompt: ReviewPrompt, quality: float) -> str:
        draw = rng.random()
        if draw < self.p_sentiment:
            good, strong = rng.random() < quality, rng.random() < 0.5
            negated = rng.random() < self.negation
            adjective = rng.choice(_adjectives(good != negated, strong))
            pattern = words.NEGATED_CLAUSE if negated else rng.choice(words.ADJECTIVE_CLAUSES)
            return self._fill(rng, pattern, prompt, adjective)
        if draw < self.p_sentiment + self.p_neutral:
            return self._fill(rng, rng.choice(words.ADJECTIVE_CLAUSES), prompt, rng.choice(words.NEUTRAL))
        return self._fill(rng, rng.choice(self._fillers()), prompt, "")

    def _fill(self, rng: random.Random, pattern: str, prompt: ReviewPrompt, adjective: str) -> str:
        return _SLOT.sub(lambda slot: self._slot(rng, slot.group(1), prompt, adjective), pattern)

    def _slot(self, rng: random.Random, name: str, prompt: ReviewPrompt, adjective: str) -> str:
        if name == "adjective":
            return adjective
        if name == "aspect":
            return rng.choice(words.TOPICS[prompt.topic])
        if name in ("who", "when") and rng.random() < self.p_echo:
            return prompt.who if name == "who" else prompt.when
        return rng.choice(words.SLOTS[name])

    def _fillers(self) -> tuple[str, ...]:
        return words.STYLE_FILLERS if self.style else words.FILLERS

    def _adjective_clauses(self) -> tuple[str, ...]:
        return words.ADJECTIVE_CLAUSES + ((words.NEGATED_CLAUSE,) if self.negation > 0 else ())

    # ---- truth ---------------------------------------------------------------------------------------------

    def parse(self, text: str, topic: str) -> list[Clause]:
        """Parses a review into clauses; those that the grammar cannot produce for `topic` are "broken"."""
        if topic not in words.TOPICS:
            raise ValueError(f"unknown topic {topic!r}; expected one of {', '.join(words.TOPICS)}")
        clauses: list[Clause] = []
        pending: list[re.Match[str]] = []
        for token in _WORD.finditer(text.rstrip()):
            if token.group() == ".":
                clauses.append(self._clause(pending, topic, token))
                pending = []
            else:
                pending.append(token)
        if pending:  # cut by the token limit, or never closed
            clauses.append(Clause("broken", 0.0, pending[0].start(), pending[-1].end()))
        return clauses

    def _clause(self, tokens: list[re.Match[str]], topic: str, stop: re.Match[str]) -> Clause:
        start = tokens[0].start() if tokens else stop.start()
        kind, polarity, decisive = _read_clause(self, tuple(token.group() for token in tokens), topic)
        spans = tuple((tokens[index].start(), tokens[index].end()) for index in decisive)
        return Clause(kind, polarity, start, stop.end(), spans)

    def true_reward(self, text: str, topic: str) -> ReviewScore:
        """Computes a review's true reward: the mean over its distinct sentiment and broken clauses.

        A valid sentiment clause counts with its polarity, and a broken one (unparsable, about another topic, or cut)
        with -1. Fillers, neutral clauses and repetitions do not count. The reward is 0 if no clause counts.
        """
        clauses = self.parse(text, topic)
        valid: dict[str, float] = {}
        broken: dict[str, float] = {}
        for clause in clauses:
            key = " ".join(text[clause.start : clause.end].split())
            if clause.kind == "sentiment":
                valid[key] = clause.polarity
            elif clause.kind == "broken":
                broken[key] = -1.0
        counted = [*valid.values(), *broken.values()]
        return ReviewScore(
            reward=sum(counted) / len(counted) if counted else 0.0,
            polarity=sum(valid.values()) / len(valid) if valid else 0.0,
            broken=sum(clause.kind == "broken" for clause in clauses),
            clauses=len(clauses),
        )

    def importance(self, text: str, topic: str) -> list[tuple[int, int]]:
        """Returns the character spans of words that determine the reward: polar adjectives, and "not" before them."""
        return [span for clause in self.parse(text, topic) for span in clause.decisive]

    def part_scores(self, text: str, topic: str) -> list[tuple[str, int]]:
        """Returns all clauses with importance scores: filler 1, neutral 2, broken 3, mild 4, strong 5."""
        fixed = {"filler": 1, "neutral": 2, "broken": 3}
        return [
            (text[c.start : c.end], fixed[c.kind] if c.kind in fixed else (5 if abs(c.polarity) == 1.0 else 4))
            for c in self.parse(text, topic)
        ]

    # ---- identity ------------------------------------------------------------------------------------------

    def vocabulary(self) -> list[str]:
        """Returns a sorted list of all words in prompts and reviews of this grammar."""
        patterns = (*self._adjective_clauses(), *self._fillers(), words.PROMPT)
        vocabulary = {"."}
        for pattern in patterns:
            for slot in _SLOT.findall(pattern):
                entries = tuple(words.TOPICS) if slot == "topic" else words.SLOTS[slot]
                vocabulary.update(word for entry in entries for word in entry.split())
            vocabulary.update(word for word in pattern.split() if not word.startswith("{"))
        return sorted(vocabulary)

    def digest(self) -> str:
        """Returns the grammar's identity: a SHA-256 over settings, word lists, patterns and rules version."""
        content = {
            "rules": RULES_VERSION,
            "knobs": asdict(self),
            "topics": {topic: list(aspects) for topic, aspects in words.TOPICS.items()},
            "polarity": dict(words.POLARITY),
            "slots": {name: list(entries) for name, entries in words.SLOTS.items()},
            "patterns": [*self._adjective_clauses(), words.NEGATED_CLAUSE, *self._fillers(), words.PROMPT],
        }
        return _digest(json.dumps(content, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _adjectives(good: bool, strong: bool) -> tuple[str, ...]:
    if good:
        return words.STRONG_GOOD if strong else words.MILD_GOOD
    return words.STRONG_BAD if strong else words.MILD_BAD


@lru_cache(maxsize=1)
def _prompt_index() -> dict[str, ReviewPrompt]:
    filled = (
        ReviewPrompt(*slots) for slots in itertools.product(words.TOPICS, words.SLOTS["who"], words.SLOTS["when"])
    )
    return {prompt.text: prompt for prompt in filled}


@lru_cache(maxsize=32)
def _prompts(grammar: Grammar) -> dict[str, tuple[ReviewPrompt, ...]]:
    # The salt makes the order independent of the digest that decides the split.
    mixed = sorted(_prompt_index().values(), key=lambda prompt: _digest("order " + prompt.text))
    return {split: tuple(p for p in mixed if grammar.split_of(p) == split) for split in SPLITS}


def _pattern_regex(pattern: str) -> str:
    parts: list[str] = []
    for piece in re.split(r"(\{\w+\})", pattern):
        slot = _SLOT.fullmatch(piece)
        if slot is None:
            parts.append(re.escape(piece))
            continue
        name = slot.group(1)
        alternatives = "|".join(re.escape(entry) for entry in words.SLOTS[name])
        parts.append(f"(?P<{name}>{alternatives})" if name in ("aspect", "adjective") else f"(?:{alternatives})")
    return "".join(parts)


@lru_cache(maxsize=32)
def _regexes(adjective: tuple[str, ...], fillers: tuple[str, ...]) -> tuple[list[re.Pattern[str]], re.Pattern[str]]:
    judging = [re.compile(_pattern_regex(pattern)) for pattern in adjective]
    return judging, re.compile("|".join(_pattern_regex(pattern) for pattern in fillers))


@lru_cache(maxsize=65536)
def _read_clause(grammar: Grammar, tokens: tuple[str, ...], topic: str) -> tuple[str, float, tuple[int, ...]]:
    """Returns kind, polarity and indices of decisive words of a clause, given without its full stop."""
    text = " ".join(tokens)
    judging, filler = _regexes(grammar._adjective_clauses(), grammar._fillers())
    if filler.fullmatch(text):
        return "filler", 0.0, ()
    for pattern in judging:
        clause = pattern.fullmatch(text)
        if clause is None or clause["aspect"] not in words.TOPICS[topic]:
            continue
        polarity = words.POLARITY[clause["adjective"]]
        if polarity == 0.0:
            return "neutral", 0.0, ()
        decisive = [tokens.index(clause["adjective"])]
        if "not" in tokens:
            return "sentiment", -polarity, (tokens.index("not"), *decisive)
        return "sentiment", polarity, tuple(decisive)
    return "broken", 0.0, ()
