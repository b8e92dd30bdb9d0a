"""Recorded answers of the kinds that models give, good and bad: what is read, and what is counted."""

import json

import pytest

from attnpo.text.verbal import EMPTY_PART, NO_PARTS, NOT_IN_RESPONSE, OUT_OF_SCALE, read_answer

RESPONSE = 'Boil the eggs for 7 minutes. Then cool them, "shock" style, in ice water. Peel and serve.'
A, B, C = "Boil the eggs for 7 minutes.", 'Then cool them, "shock" style, in ice water.', "Peel and serve."
FULL = [(A, 5.0), (B, 4.0), (C, 2.0)]


def objects(*parts: tuple[str, object]) -> str:
    return json.dumps([{"part": text, "score": score} for text, score in parts])


# name, answer, spans expected as (text, score), problems expected
RECORDED: list[tuple[str, str, list[tuple[str, float]], dict[str, int]]] = [
    ("json objects", objects((A, 5), (B, 4), (C, 2)), FULL, {}),
    (
        "json in a fence with talk around it",
        f"Sure! Here it is:\n```json\n{objects((A, 5), (B, 4), (C, 2))}\n```\nHope it helps.",
        FULL,
        {},
    ),
    (
        "json over several lines",
        json.dumps([{"part": A, "score": 5}, {"part": B, "score": 4}, {"part": C, "score": 2}], indent=2),
        FULL,
        {},
    ),
    (
        "other key names",
        json.dumps([{"Text": A, "Importance": 5}, {"Text": B, "Importance": 4}, {"Text": C, "Importance": 2}]),
        FULL,
        {},
    ),
    ("pairs", json.dumps([[A, 5], [B, 4], [C, 2]]), FULL, {}),
    ("parts as keys", json.dumps([{A: 5}, {B: 4}, {C: 2}]), FULL, {}),
    ("trailing commas", objects((A, 5), (B, 4), (C, 2)).replace("}]", "},]").replace("2}", "2,}"), FULL, {}),
    ("cut off in the middle", objects((A, 5), (B, 4), (C, 2))[:-18], FULL[:2], {}),
    ("scores as text", objects((A, "5"), (B, "4/5"), (C, "2 out of 5")), FULL, {}),
    ("half points", objects((A, 4.5), (B, 4), (C, 2)), [(A, 4.5), *FULL[1:]], {}),
    (
        "single quotes instead of double",
        objects((A, 5), (B.replace('"', "'"), 4), (C, 2)),
        [FULL[0], FULL[2]],
        {NOT_IN_RESPONSE: 1},
    ),
    ("curly quotes", objects((A, 5), (B.replace('"shock"', "“shock”"), 4), (C, 2)), FULL, {}),
    ("other case and blanks", objects((A.upper(), 5), (B.replace(" ", "\n  "), 4), (C, 2)), FULL, {}),
    ("lines with arrows", f"{A} -> 5\n{B} -> 4\n{C} -> 2", FULL, {}),
    ("numbered lines", f'1. "{A}" - 5\n2. "{B}" - 4\n3. "{C}" - 2', FULL, {}),
    ("lines with colons and a scale", f"- {A}: 5/5\n- {B}: 4/5\n- {C}: 2/5", FULL, {}),
    ("score first", f"[5] {A}\n[4] {B}\n[2] {C}", FULL, {}),
    ("a table", f"| part | score |\n|---|---|\n| {A} | 5 |\n| {B} | 4 |\n| {C} | 2 |", FULL, {}),
    ("bold scores", f"{A} **5**\n{B}: **4**\n{C}: **2**", FULL[1:], {}),
    ("words about the score", f"{A} (score: 5)\n{B} (score: 4)\n{C} (score: 2)", FULL, {}),
    ("a part missing", objects((A, 5), (C, 2)), [FULL[0], FULL[2]], {}),
    ("reordered", objects((C, 2), (A, 5), (B, 4)), FULL, {}),
    ("paraphrased", objects(("Cook the eggs seven minutes", 5), (B, 4), (C, 2)), FULL[1:], {NOT_IN_RESPONSE: 1}),
    ("invented part", objects((A, 5), (B, 4), (C, 2), ("Enjoy!", 1)), FULL, {NOT_IN_RESPONSE: 1}),
    ("the same part twice", objects((A, 5), (A, 3), (B, 4), (C, 2)), FULL, {NOT_IN_RESPONSE: 1}),
    (
        "overlapping parts",
        objects((A + " Then cool them,", 5), (B, 4), (C, 2)),
        [(A + " Then cool them,", 5.0), FULL[2]],
        {NOT_IN_RESPONSE: 1},
    ),
    ("scale of ten", objects((A, 9), (B, "7/10"), (C, 2)), FULL[2:], {OUT_OF_SCALE: 2}),
    ("zero and negative", objects((A, 0), (B, -1), (C, 2)), FULL[2:], {OUT_OF_SCALE: 2}),
    ("score is a word", objects((A, "high"), (B, 4), (C, True)), FULL[1:2], {OUT_OF_SCALE: 2}),
    ("no score", json.dumps([{"part": A}, {"part": B, "score": 4}]), FULL[1:2], {OUT_OF_SCALE: 1}),
    ("empty parts", objects(("", 5), ("  ", 3), (C, 2)), FULL[2:], {EMPTY_PART: 2}),
    ("empty answer", "", [], {NO_PARTS: 1}),
    ("a refusal", "I'm sorry, but I cannot rate parts of this text.", [], {NO_PARTS: 1}),
    ("the response repeated", RESPONSE, [], {NO_PARTS: 1}),
    ("braces inside", '{"part": "Peel {and} serve.", "score": 2}', [], {NO_PARTS: 1}),
]


@pytest.mark.parametrize(
    ("answer", "spans", "problems"), [case[1:] for case in RECORDED], ids=[case[0] for case in RECORDED]
)
def test_recorded_answers(answer: str, spans: list[tuple[str, float]], problems: dict[str, int]) -> None:
    reading = read_answer(answer, RESPONSE)
    assert [(RESPONSE[span.start : span.end], span.score) for span in reading.spans] == spans
    assert dict(reading.problems) == problems


def test_there_are_thirty_malformed_answers() -> None:
    assert len(RECORDED) - 1 >= 30


def test_repeated_text_takes_the_places_in_order() -> None:
    reading = read_answer(objects(("yes", 1), ("no", 3), ("yes", 5)), "yes, no, yes")
    assert [(span.start, span.end, span.score) for span in reading.spans] == [(0, 3, 1.0), (5, 7, 3.0), (9, 12, 5.0)]
    assert reading.covered(12) == pytest.approx(8 / 12)


def test_letters_that_fold_to_several_keep_their_places() -> None:
    response = "Die Straße ist naß."
    reading = read_answer(objects(("STRASSE ist", 4)), response)
    assert [response[span.start : span.end] for span in reading.spans] == ["Straße ist"]
