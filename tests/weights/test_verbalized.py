"""Verbalised weights: what is asked, how scores come to stand on tokens, what is counted, what the store keeps."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from attnpo.schema import Message, PairWeights, PreferencePair, Sampling, UserError
from attnpo.system.store import Store
from attnpo.text.chat import RefusedText
from attnpo.weights.base import WeightSource, required_coverage
from attnpo.weights.capture import UnreadablePair, ensure_captured, weights_key
from attnpo.weights.readers import VerbalizerStatistics, answer_statistics
from attnpo.weights.score_parser import NO_PARTS, NOT_IN_RESPONSE, ScoredSpan, parse_scores
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.verbalized import LoadedVerbalizer, Verbalized, spread_scores
from attnpo.weights.verbalizer_settings import ScorePromptBuilder

GREEDY = Sampling(max_new_tokens=64, temperature=0.0)
GOOD = PreferencePair.from_texts([{"role": "user", "content": "eggs"}], "Boil them. Then peel.", "No idea.")
LONG = PreferencePair.from_texts([{"role": "user", "content": "eggs"}], "Boil " * 40, "No idea.")


@dataclass
class Words(ScorePromptBuilder):
    """Asks in few words; tokens are words with the blank before them; at most ``room`` characters are shown."""

    room: int = 100

    def build_prompt(self, pair: PreferencePair, side: str) -> list[Message]:
        if len(pair.response(side)) > self.room:
            raise RefusedText("too long", f"the {side} response has {len(pair.response(side))} characters")
        return [Message(role="user", content=f"score: {pair.response(side)}")]

    def training_tokens(self, pair: PreferencePair, side: str) -> tuple[list[int], list[tuple[int, int]]]:
        text, places, start = pair.response(side), [], 0
        for word in text.split(" "):
            end = start + len(word) + (1 if start else 0)
            places.append((start, end))
            start = end
        return list(range(10, 10 + len(places))), places

    def fingerprint(self) -> dict[str, Any]:
        return {"words": self.room}


@dataclass
class Recorded:
    """Gives the recorded answer to the response in a prompt; ``calls`` has the number of prompts of each call."""

    answers: dict[str, str]
    calls: list[int] = field(default_factory=list)

    def generate(self, prompts: Sequence[Sequence[Message]], sampling: Sampling) -> list[str]:
        self.calls.append(len(prompts))
        assert sampling == GREEDY
        return [self.answers[prompt[-1]["content"].removeprefix("score: ")] for prompt in prompts]


def parts(*scored: tuple[str, object]) -> str:
    return json.dumps([{"part": text, "score": score} for text, score in scored])


ANSWERS = {GOOD.chosen: parts(("Boil them.", 5), ("Then peel.", 2)), GOOD.rejected: "I cannot say."}


def tools(generator: Recorded, **more: Any) -> LoadedVerbalizer:
    return LoadedVerbalizer(generator=generator, questions=Words(**more), sampling=GREEDY)


def test_it_is_a_source_with_a_least_coverage_of_its_own() -> None:
    source = Verbalized()
    assert isinstance(source, WeightSource) and source.partial
    assert (required_coverage(source), required_coverage(source, 0.5), required_coverage(Attention(1))) == (
        0.9,
        0.5,
        0.0,
    )


def test_scores_stand_on_the_tokens_of_their_part_and_silence_is_zero() -> None:
    generator = Recorded(ANSWERS)
    (found,) = Verbalized().capture([GOOD], tools(generator), (0,))
    assert generator.calls == [2], "both prompts in one call"
    (only,) = found.rounds
    assert only.chosen.weights.tolist() == [[5.0, 5.0, 2.0, 2.0]]
    assert only.chosen.offsets.tolist() == [[0, 4], [4, 10], [10, 15], [15, 21]]
    assert only.rejected.weights.tolist() == [[0.0, 0.0]]
    assert only.verdict_logits is None


def test_who_cannot_be_asked_is_unreadable_and_costs_no_answer() -> None:
    generator = Recorded(ANSWERS)
    refused, found = Verbalized().capture([LONG, GOOD], tools(generator), (0,))
    assert refused == UnreadablePair(LONG.pair_id, (), "too long", "the chosen response has 200 characters")
    assert found.pair_id == GOOD.pair_id and len(found.rounds) == 1
    assert generator.calls == [2]
    assert [type(pair) for pair in Verbalized().capture([LONG], tools(generator), (0,))] == [UnreadablePair]
    assert generator.calls == [2], "nothing was asked where nothing can be"


def test_without_a_generator_the_group_to_set_is_named() -> None:
    with pytest.raises(UserError, match="set the config group verbalizer"):
        Verbalized().capture([GOOD], None, (0,))


SPREAD: list[tuple[str, list[ScoredSpan], list[tuple[int, int]], list[float]]] = [
    ("two parts in one token", [ScoredSpan(0, 3, 5.0), ScoredSpan(3, 4, 1.0)], [(0, 4)], [4.0]),
    ("blanks belong to the part before", [ScoredSpan(0, 2, 3.0)], [(0, 2), (2, 3), (3, 4)], [3.0, 3.0, 0.0]),
    ("a word's own blank does not", [ScoredSpan(0, 2, 5.0), ScoredSpan(3, 4, 1.0)], [(0, 2), (2, 4)], [5.0, 1.0]),
    ("nor does it make an unscored word scored", [ScoredSpan(0, 2, 5.0)], [(0, 2), (2, 4)], [5.0, 0.0]),
    ("a token half in a part takes its score", [ScoredSpan(0, 1, 4.0)], [(0, 2), (2, 4)], [4.0, 0.0]),
    ("blanks within a part are of it", [ScoredSpan(0, 4, 3.0)], [(0, 2), (2, 3), (3, 4)], [3.0, 3.0, 3.0]),
    ("nothing said", [], [(0, 2), (2, 4)], [0.0, 0.0]),
]


@pytest.mark.parametrize(
    ("spans", "places", "expected"), [case[1:] for case in SPREAD], ids=[case[0] for case in SPREAD]
)
def test_spread(spans: list[ScoredSpan], places: list[tuple[int, int]], expected: list[float]) -> None:
    assert spread_scores(spans, "ab c", places).tolist() == expected


def test_a_paragraph_break_within_a_part_has_its_score() -> None:
    response = "Hello there\n\nfriend. Bye"
    spans = parse_scores(parts(("Hello there\n\nfriend.", 4)), response).spans
    places = [(0, 5), (5, 11), (11, 13), (13, 20), (20, 24)]
    assert spread_scores(spans, response, places).tolist() == [4.0, 4.0, 4.0, 4.0, 0.0]


def test_rows_and_refusals_come_back_from_the_store_as_they_were(tmp_path: Path) -> None:
    source = Verbalized()
    key = weights_key(source, {"weights": "w"}, Words().fingerprint())

    def run(make: Any) -> tuple[dict[str, PairWeights], Any]:
        return ensure_captured([GOOD, LONG], source, (0,), Store(tmp_path), key, make)

    first, report = run(lambda: tools(Recorded(ANSWERS)))
    again, second = run(lambda: pytest.fail("all of it is stored"))
    assert (report.computed, second.computed) == (2, 0)
    assert torch.equal(first[GOOD.pair_id].rounds[0].chosen.weights, again[GOOD.pair_id].rounds[0].chosen.weights)
    assert again[LONG.pair_id] == first[LONG.pair_id]
    assert isinstance(again[LONG.pair_id], UnreadablePair)


def statistics(answers: dict[tuple[str, str], str]) -> VerbalizerStatistics:
    captured = {pair.pair_id: pair for pair in Verbalized().capture([GOOD, LONG], tools(Recorded(ANSWERS)), (0,))}
    return answer_statistics([GOOD, LONG, GOOD], captured, answers)


def test_what_could_not_be_read_is_counted_by_reason() -> None:
    found = statistics({(GOOD.pair_id, side): ANSWERS[GOOD.response(side)] for side in ("chosen", "rejected")})
    assert found == VerbalizerStatistics(2, 2, 1, 2, 0.5, {NO_PARTS: 1}, unasked=1)
    assert found.parse_rate == 0.5
    numbers = found.to_dict()
    assert json.loads(json.dumps(numbers)) == numbers
    assert (numbers["parse_rate"], numbers["problems"]) == (0.5, {NO_PARTS: 1})


def test_answers_that_left_the_store_are_said_to_be_lost() -> None:
    found = statistics({(GOOD.pair_id, "chosen"): parts(("Boil them.", 5), ("Bake them.", 1))})
    assert (found.answers, found.lost, found.problems, found.coverage) == (1, 1, {NOT_IN_RESPONSE: 1}, 0.5)
