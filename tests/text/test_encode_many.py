"""Many conversations tokenised at once: token for token what one at a time gives, with every count and log line."""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnpo.data.base import pairs_from_rows
from attnpo.data.prepare import encode_pairs
from attnpo.data.rules import KeepSide, LengthRules, OverlongAction
from attnpo.schema import Message, PreferencePair, UserError
from attnpo.text import chat as chat_module
from attnpo.text.chat import ChatFormat, EncodedResponses
from attnpo.text.ranges import Range, _find_gaps, as_array, as_ranges, extend_over_gaps
from attnpo.text.traces import TextSpan, to_response_range, to_response_ranges
from tests import own_texts
from tests.text.formats import CHATML, FORMATS, GOLDEN, GPT2, LLAMA2_LIKE, PLAIN, REAL, SHARED, Formats
from tests.text.test_families import FAMILIES, FOLDER
from tests.text.test_tools import CALLED, HIDES, QUOTES, TOOLS, USES
from tests.text.test_traces import DROPS, OPENS, PARSES

ANSWER = "{{ m['content'] }}"
MADE = {
    **{"parses": PARSES, "opens": OPENS, "drops": DROPS, "uses": USES, "hides": HIDES, "quotes": QUOTES},
    "no prefix": "{{ messages | length }}" + CHATML,
    "changes its head": CHATML.replace(ANSWER, "{{ ' ' * (loop.index0 % 3) }}" + ANSWER),
    "headed": CHATML.replace(ANSWER, "{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' }}" + ANSWER),
    "trims": "{{ bos_token }}" + CHATML.replace(ANSWER, "{{ m['content'] | trim }}"),
    "refuses": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML,
    "twice": CHATML.replace(ANSWER, "{{ m['content'] }}{{ m['content'] if m.role == 'assistant' }}"),
    "merges": PLAIN.replace("assistant:{% endif %}", "assistant: {% endif %}"),
    "leaves turns open": LLAMA2_LIKE.replace("{{ eos_token }}", ""),
}
TEMPLATES = {
    **FORMATS,
    **{f"gpt2, {name}": (GPT2, MADE[name]) for name in ("trims", "merges")},
    **{name: (GOLDEN, template) for name, template in MADE.items()},
    **{family: (GOLDEN, (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")) for family in FAMILIES},
}
ODD = [
    *("", " ", "\n", "Yes.", " It is.", "It is.\n", "\n\n \tIt is \n", "a\r\nb", "!", ".\n", "ATTNPOPLACEHOLDER"),
    *(
        "\ud83d",
        "a\udc00b",
        "👩🏽‍🔬",
        "ﬁ é e\u0301",
        "\x00",
        "天空是蓝色的。",
        "{{ x }}",
        "[INST] a [/INST]",
        "assistant:",
    ),
    *("<think>\nRayleigh\n</think>\n\nIt is.", "<think>a</think>b", "<think>open", "</think>"),
    *("\n<think> \n</think>\n", "</s>", "<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>"),
    *("a<|im_start|>user\nb", "<s>"),
]
RULES = [
    *(LengthRules(), LengthRules(60, 40), LengthRules(24, 16), LengthRules(60, 40, OverlongAction.DROP)),
    *(LengthRules(60, 40, keep=KeepSide.END), LengthRules(4, 3)),
]
TEXTS = st.lists(st.one_of(st.sampled_from(ODD), st.text(max_size=8)), max_size=3).map("".join)


@st.composite
def prompts(draw: st.DrawFn) -> list[Message]:
    """Draws turns: a system turn at times, earlier answers with their traces, tools with their calls."""
    turns = [Message(role="system", content=draw(TEXTS))] if draw(st.booleans()) else []
    kind = draw(st.sampled_from(["one", "one", "one", "earlier", "tools", "calls"]))
    if kind == "earlier":
        turns.append(Message(role="user", content=draw(TEXTS)))
        turns.append(Message(role="assistant", content=draw(TEXTS)))
        if draw(st.booleans()):
            turns[-1]["reasoning_content"] = draw(TEXTS)
    turns.append(Message(role="user", content=draw(TEXTS)))
    if kind in ("tools", "calls"):
        turns[0]["tools"] = TOOLS
    return [*turns, *(CALLED[1:] if kind == "calls" else ())]


PAIRS = st.lists(st.builds(PreferencePair.from_texts, prompts(), TEXTS, TEXTS), min_size=1, max_size=8)


class OneAtATime(ChatFormat):
    """Chat format that renders and tokenises a prompt's responses before it reads the next prompt."""

    def encode_many(
        self, conversations: Iterable[tuple[Sequence[Message], Sequence[str]]]
    ) -> Iterator[EncodedResponses]:
        """Yields what each prompt's responses are by themselves."""
        return (self.encode_responses(*one) for one in conversations)


class Lines(logging.Handler):
    """Log lines while it is open."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[str, str]] = []
        self.logger = logging.getLogger("attnpo")
        self.before = self.logger.level

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))

    def __enter__(self) -> "Lines":
        self.logger.setLevel(logging.INFO)
        self.logger.addHandler(self)
        return self

    def __exit__(self, *problem: object) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(self.before)


def outcome(pairs: Sequence[PreferencePair], chat: ChatFormat, rules: LengthRules, same: bool = False) -> list[Any]:
    """Returns all that encoding pairs leaves behind."""
    found: Any = None
    with Lines() as heard:
        try:
            found = encode_pairs(iter(pairs), chat, rules, keep_same=same)
        except UserError as problem:
            found = (type(problem), str(problem))
    return [found, chat.counts, chat._ends, chat.end_ids, chat.counts, heard.lines]


@pytest.mark.parametrize("name", TEMPLATES)
def test_many_at_once_are_what_one_at_a_time_gives(formats: Formats, name: str) -> None:
    """Texts of every odd kind in random pairs, with a model of too few rows at times; three prompts at once."""
    folder, template = TEMPLATES[name]
    tokenizer = formats.tokenizer(folder)
    if template is not None and folder == GOLDEN:
        tokenizer = formats.mark_turns(re.findall(r"<[|\uff5c]?[\w\u2581/]+[|\uff5c]?>", template))

    @settings(max_examples=10, suppress_health_check=list(HealthCheck))
    @given(PAIRS, st.sampled_from(RULES), st.booleans(), st.sampled_from([None, None, len(tokenizer) - 1, 300]))
    def check(pairs: list[PreferencePair], rules: LengthRules, same: bool, rows: int | None) -> None:
        try:
            old, new = (kind(tokenizer, template, rows=rows) for kind in (OneAtATime, ChatFormat))
        except UserError:
            return
        with patch.object(chat_module, "AT_ONCE", 3):
            assert outcome(pairs, new, rules, same) == outcome(pairs, old, rules, same)

    check()


@pytest.mark.parametrize("name", FORMATS | REAL)
def test_real_pairs_are_what_one_at_a_time_gives(formats: Formats, name: str) -> None:
    folder, template = (FORMATS | REAL)[name]
    tokenizer, pairs = formats.tokenizer(folder), pairs_from_rows(own_texts.rows(40)).pairs
    for file in sorted(SHARED.glob("data/*/*.jsonl")):  # others' texts, where they are at hand
        with file.open(encoding="utf-8") as lines:
            pairs += pairs_from_rows([json.loads(line) for line in islice(lines, 10)]).pairs
    old, new = (kind(tokenizer, template) for kind in (OneAtATime, ChatFormat))
    rules = LengthRules(512, 256)
    assert len(pairs) > 35
    assert outcome(pairs, new, rules) == outcome(pairs, old, rules)


def test_pairs_are_read_a_few_batches_ahead_of_what_is_given(formats: Formats) -> None:
    read = 0

    def conversations() -> Any:
        nonlocal read
        for read in range(1, 101):
            yield [Message(role="user", content=f"{read}?")], ["Yes.", "No."]

    with patch.object(chat_module, "AT_ONCE", 4):
        found = formats("gpt2_chatml").encode_many(conversations())
        for given_so_far in range(1, 101):
            assert len(next(found).encoded) == 2
            assert read <= given_so_far + 2 * 4
    assert list(found) == []


def test_few_long_texts_are_tokenised_at_once(formats: Formats) -> None:
    chat = formats("gpt2_chatml")
    rest = iter([([Message(role="user", content="a" * 50)], ["b" * 50])] * 5)
    with patch.object(chat_module, "CHARACTERS", 300), chat_module.ThreadPoolExecutor(1) as pool:
        assert [len(chat._start_batch(rest, pool)[0]) for _ in range(4)] == [2, 2, 1, 0]


def grow(places: Sequence[Range], text: str, begin: int, end: int) -> list[Range]:
    """Extends ranges over the characters that none of them holds, token by token."""
    gaps = _find_gaps(places, text, begin, end)
    grown = []
    for start, stop in places:
        inside = begin < stop and start < end and start < stop
        first, last = gaps.get((start, True), start), gaps.get((stop, False), stop)
        grown.append((first, last) if inside else (start, stop))
    return grown


PLACES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), max_size=8).map(
    lambda drawn: sorted((start, start + size) for start, size in drawn)
)
NEXT = st.lists(st.integers(0, 3), max_size=8).map(
    lambda sizes: [(sum(sizes[:place]), sum(sizes[: place + 1])) for place in range(len(sizes))]
)


@given(
    st.one_of(PLACES, NEXT),
    st.integers(0, 8),
    st.integers(0, 8),
    st.sampled_from(["abcdefghijklmnop", "a b  c d e\n f   g"]),
)
def test_ranges_grow_and_move_as_token_by_token(
    places: list[tuple[int, int]], begin: int, size: int, text: str
) -> None:
    end = begin + size
    assert as_ranges(extend_over_gaps(as_array(places), text, begin, end)) == grow(places, text, begin, end)
    for cut in range(begin, end + 1):
        pieces = [TextSpan(begin, cut, 3), TextSpan(cut + 1, end + 1, 40)]
        pieces = [piece for piece in pieces if piece.end > piece.start] or [TextSpan(begin, end, 3)]
        assert as_ranges(to_response_ranges(as_array(places), pieces, 99)) == [
            to_response_range(*place, pieces, 99) for place in places
        ]
