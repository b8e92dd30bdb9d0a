"""Tokens estimated before a call is made, by hand and on real texts with real tokenizers."""

import json
import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from attnpo.evaluation.grading.asking import ask_all
from attnpo.evaluation.grading.base import GradingCall, GradingReply
from attnpo.evaluation.grading.input_tokens import ENOUGH, InputTokens
from attnpo.evaluation.grading.scripted import ScriptedGrader
from attnpo.evaluation.grading.store import ReplyStore
from attnpo.schema import Message
from tests.evaluation.grading.calls import call

log = logging.getLogger(__name__)


def estimated() -> InputTokens:
    return InputTokens(ScriptedGrader({}))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("Two words.", 3),
        ("internationally 2024", 3 + 4),
        ("日本語 é да", 6),
        ("a\n\nb", 4),
        ("{}();", 3),
        ("if:\n      a", 6),
    ],
)
def test_tokens_are_estimated_from_pieces(text: str, tokens: int) -> None:
    assert estimated().raw(call(1, text or " ")) == tokens + 3  # "You grade."


def test_the_estimate_is_corrected_from_twenty_replies_on() -> None:
    tokens, asked = estimated(), call(1, "word " * 97)
    for _ in range(ENOUGH - 1):
        tokens.saw(asked, GradingReply("", input_tokens=150))
    assert tokens.of(asked) == 100
    tokens.saw(asked, GradingReply("", input_tokens=0))  # a reply without an account
    assert tokens.of(asked) == 100
    tokens.saw(asked, GradingReply("", input_tokens=150))
    assert tokens.of(asked) == 150 and tokens.total([asked, asked]) == 300
    assert tokens.method == "estimated from the text, fitted to 20 replies, which took 1.50 times as many"


def test_kinds_of_text_have_rates_of_their_own() -> None:
    """A word of this tokenizer is one token and a Chinese sign two and a half: no one ratio fits both."""
    tokens = estimated()
    words, signs = "word " * 200, "字" * 200
    for place in range(ENOUGH):
        tokens.saw(call(place, words), GradingReply("", input_tokens=203))
        tokens.saw(call(place, signs), GradingReply("", input_tokens=503))
    assert tokens.of(call(1, "word " * 400)) == pytest.approx(403, rel=0.03)
    assert tokens.of(call(1, "字" * 400)) == pytest.approx(1003, rel=0.03)


def test_a_tokenizers_count_is_corrected_by_one_ratio() -> None:
    tokens = InputTokens(ScriptedGrader({}, tokens=lambda asked: 10 * len(asked.item)))
    for place in range(ENOUGH):
        tokens.saw(call(place), GradingReply("", input_tokens=11 * len(call(place).item)))
    assert tokens.of(call(1)) == 22 and tokens.exact
    assert tokens.method == "counted by the grader's tokenizer, times 1.10 after 20 replies"


def test_every_beginning_of_the_order_is_like_the_whole() -> None:
    """100 short calls, 100 ten times as long, 50 Chinese ones, group by group, with 11, 60 and 29 % of the pieces.

    The first 20 are drawn by pieces, the others by number.
    """
    texts = ["word " * 17] * 100 + ["word " * 107] * 100 + ["字" * 102] * 50
    calls = [call(place, text) for place, text in enumerate(texts)]
    spread = estimated().spread(calls)
    assert sorted(spread, key=calls.index) == calls
    kinds = np.array([(int(each.item[1:]) >= 100) + (int(each.item[1:]) >= 200) for each in spread])
    assert np.bincount(kinds[:20], minlength=3) == pytest.approx(np.array([2, 11, 5]) * 20 / 18, abs=1.1)
    assert np.bincount(kinds[20:120], minlength=3) == pytest.approx([43, 38, 19], abs=3)
    few = calls[:ENOUGH]
    assert estimated().spread(few) == few
    assert InputTokens(ScriptedGrader({}, tokens=lambda _: 7)).spread(calls) == calls


def test_the_first_replies_are_awaited_and_the_rest_is_told_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = [call(place, "word " * 7 * (place + 1)) for place in range(50)]
    grader = ScriptedGrader(lambda asked: GradingReply("7", input_tokens=2 * true_pieces(asked)), at_once=16)
    with caplog.at_level(logging.INFO):
        asked = ask_all(calls, grader, ReplyStore(tmp_path))
    assert asked.whole and sorted(grader.asked, key=calls.index) == calls
    left = sum(2 * true_pieces(each) for each in grader.asked[ENOUGH:])
    assert f"grading: 30 calls left: {left:,} input tokens" in caplog.text


def true_pieces(asked: GradingCall) -> int:
    return asked.messages[1]["content"].count("word") + 3


# ------------------------------------------------------------------------------------------------ real texts

TEXTS = {
    "alpaca": ("alpaca_eval_pairs", "train", 120),
    "harmless": ("hh_harmless_test", "train", 120),
    "english": ("llamafactory_demo", "train_en", 100),
    "chinese": ("llamafactory_demo", "train_zh", 100),
    "ultrafeedback": ("ultrafeedback_sample", "train", 120),
}
TOKENIZERS = ("tokenizers/gpt2", "tokenizers/mistral_v3", "tokenizers/edge_merge_2k", "stories260K")
# Calls of each kind that are asked: benchmarks of one kind of text, of two languages, of one with a few in another.
MIXTURES = {
    "one kind, short": {"alpaca": 100},
    "one kind, long": {"ultrafeedback": 100},
    "half English, half Chinese": {"english": 60, "chinese": 60},
    "English, one in twenty Chinese": {"english": 95, "chinese": 5},
    "two kinds, one five times as long": {"harmless": 60, "ultrafeedback": 60},
    "everything": dict.fromkeys(TEXTS, 50),
}
DRAWS = 40  # of the calls and of the order in which they are given, half of the orders kind by kind


def real_calls(folder: Path, name: str) -> Iterator[GradingCall]:
    """Comparisons of two real answers, as a judge would read them."""
    place, file, count = TEXTS[name]
    lines = (folder / place / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()
    for number in random.Random(0).sample(range(len(lines)), count):
        row = json.loads(lines[number])
        question, first, second = (_text(row[part]) for part in ("prompt", "chosen", "rejected"))
        text = f"Which answer is better?\n[Question]\n{question}\n[A]\n{first}\n[B]\n{second}\nSay A or B."
        yield GradingCall(name, str(number), "", 0, (Message(role="user", content=text),), max_tokens=1)


def _text(value: str | Sequence[Message]) -> str:
    return value if isinstance(value, str) else value[-1]["content"]


@pytest.mark.slow
def test_estimates_hold_on_real_texts_whatever_order_calls_come_in(shared: Path) -> None:
    """The input tokens of what is left after 20 replies: error per mixture, over tokenizers and draws.

    Each error is logged (``pytest -o log_cli=true --log-cli-level=info``); the bounds stand in docs/evaluation.md.
    """
    calls = {name: list(real_calls(shared / "data", name)) for name in TEXTS}
    every = [each for some in calls.values() for each in some]
    counted = {}
    for path in TOKENIZERS:
        tokenizer = Tokenizer.from_file(str(shared / "models" / path / "tokenizer.json"))
        counted[path] = {each: len(tokenizer.encode(each.messages[0]["content"]).ids) for each in every}
    known = estimated()
    for each in every:
        known.raw(each)
    pieces = dict(known._known)
    errors: dict[str, list[float]] = {name: [] for name in (*MIXTURES, *TOKENIZERS)}
    for name, mixture in MIXTURES.items():
        for draw in range(DRAWS):
            random_ = random.Random(draw)
            asked = [each for kind, count in mixture.items() for each in random_.sample(calls[kind], count)]
            if draw % 2:
                random_.shuffle(asked)
            order = InputTokens(ScriptedGrader({}), _known=dict(pieces)).spread(asked)
            for path, actual in counted.items():
                tokens = InputTokens(ScriptedGrader({}), _known=dict(pieces))
                for each in order[:ENOUGH]:
                    tokens.saw(each, GradingReply("", input_tokens=actual[each]))
                rest = order[ENOUGH:]
                error = tokens.total(rest) / sum(actual[each] for each in rest) - 1
                errors[name].append(error)
                errors[path].append(error)
    for name, found in errors.items():
        sizes = np.abs(found)
        told = len(found), np.median(sizes), np.quantile(sizes, 0.95), sizes.max()
        log.info("%s: %d estimates, median error %.3f, 95 %% below %.3f, worst %.3f", name, *told)
    sizes = np.abs([error for path in TOKENIZERS for error in errors[path]])
    assert np.quantile(sizes, 0.95) < 0.06
    assert sizes.max() < 0.1
