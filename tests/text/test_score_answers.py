"""Recorded answers of the kinds that models give, good and bad: what is read, and what is counted."""

import json
from collections.abc import Callable

import pytest

from attnpo.weights.score_parser import EMPTY_PART, NO_PARTS, NOT_IN_RESPONSE, OUT_OF_SCALE, parse_scores

RESPONSE = 'Boil the eggs for 7 minutes. Then cool them, "shock" style, in ice water. Peel and serve.'
A, B, C = "Boil the eggs for 7 minutes.", 'Then cool them, "shock" style, in ice water.', "Peel and serve."
FULL = [(A, 5.0), (B, 4.0), (C, 2.0)]


def objects(*parts: tuple[str, object]) -> str:
    return json.dumps([{"part": text, "score": score} for text, score in parts])


ASKED = objects((A, 5), (B, 4), (C, 2))
Case = tuple[str, str, list[tuple[str, float]], dict[str, int]]

# name, answer, spans expected as (text, score), problems expected
WELL_FORMED: list[Case] = [
    ("json objects", ASKED, FULL, {}),
    ("json in a fence with talk around it", f"Here it is:\n```json\n{ASKED}\n```\nHope it helps.", FULL, {}),
    ("other key names", ASKED.replace("part", "Text").replace("score", "Importance"), FULL, {}),
    ("pairs", json.dumps([[A, 5], [B, 4], [C, 2]]), FULL, {}),
    ("parts as keys", json.dumps([{A: 5}, {B: 4}, {C: 2}]), FULL, {}),
    ("scores as text", objects((A, "5"), (B, "4/5"), (C, "2 out of 5")), FULL, {}),
    ("half points", objects((A, 4.5), (B, 4), (C, 2)), [(A, 4.5), *FULL[1:]], {}),
    ("lines with arrows", f"{A} -> 5\n{B} -> 4\n{C} -> 2", FULL, {}),
    ("numbered lines", f'1. "{A}" - 5\n2. "{B}" - 4\n3. "{C}" - 2', FULL, {}),
    ("lines with colons and a scale", f"- {A}: 5/5\n- {B}: 4/5\n- {C}: 2/5", FULL, {}),
    ("score first", f"[5] {A}\n[4] {B}\n[2] {C}", FULL, {}),
    ("a table", f"| part | score |\n|---|---|\n| {A} | 5 |\n| {B} | 4 |\n| {C} | 2 |", FULL, {}),
    ("words about the score", f"{A} (score: 5)\n{B} (score: 4)\n{C} (score: 2)", FULL, {}),
]

MALFORMED: list[Case] = [
    ("trailing commas", ASKED.replace("}]", "},]").replace("2}", "2,}"), FULL, {}),
    ("cut off in the middle", ASKED[:-18], FULL[:2], {}),
    ("single quotes", objects((A, 5), (B.replace('"', "'"), 4), (C, 2)), FULL[::2], {NOT_IN_RESPONSE: 1}),
    ("curly quotes", objects((A, 5), (B.replace('"shock"', "“shock”"), 4), (C, 2)), FULL, {}),
    ("other case and blanks", objects((A.upper(), 5), (B.replace(" ", "\n  "), 4), (C, 2)), FULL, {}),
    ("bold scores", f"{A} **5**\n{B}: **4**\n{C}: **2**", FULL[1:], {}),
    ("a part missing", objects((A, 5), (C, 2)), FULL[::2], {}),
    ("reordered", objects((C, 2), (A, 5), (B, 4)), FULL, {}),
    ("paraphrased", objects(("Cook the eggs seven minutes", 5), (B, 4), (C, 2)), FULL[1:], {NOT_IN_RESPONSE: 1}),
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
    ("braces inside that are not there", '{"part": "Peel {and} serve.", "score": 2}', [], {NOT_IN_RESPONSE: 1}),
    (
        "nested below keys of its own",
        json.dumps({"answer": {"passages": [{"part": A, "score": 5}, {"part": B, "score": 4}]}, "more": [{C: 2}]}),
        FULL,
        {},
    ),
    ("lists within lists", json.dumps([[[A, 5], [B, 4]], [[C, 2]]]), FULL, {}),
    ("one object for all parts", json.dumps({A: 5, B: 4, C: 2}), FULL, {}),
    ("one object with a word for a score", json.dumps({A: 5, B: "high", C: 2}), FULL[::2], {OUT_OF_SCALE: 1}),
    ("score in an object", json.dumps([{"part": A, "score": {"value": 5}}, [B, 4]]), FULL[1:2], {OUT_OF_SCALE: 1}),
    ("parts and scores apart", json.dumps({"parts": [A, B, C], "scores": [5, 4, 2]}), [], {NO_PARTS: 1}),
    ("one flat list", json.dumps([A, 5, B, 4, C, 2]), [], {NO_PARTS: 1}),
    ("part and score exchanged", json.dumps([{"part": 5, "score": A}, {"part": 4, "score": B}]), [], {NO_PARTS: 1}),
    ("Python instead of JSON", repr([{"part": A, "score": 5}, {"part": C, "score": 2}]), [], {NO_PARTS: 1}),
    ("quotes not escaped", ASKED.replace("\\", ""), FULL[::2], {}),
    ("remarks in JSON", objects((A, 5), (C, 2)).replace("}, ", "}, // timing\n"), FULL[::2], {}),
    ("brackets before it", f"All [three] {{of them}}:\n{ASKED}", FULL, {}),
    ("brackets without end", "[{" * 3000 + objects((A, 5)), FULL[:1], {}),
    ("no number and a huge one", objects((A, float("nan")), (B, 10**400), (C, 2)), FULL[2:], {OUT_OF_SCALE: 2}),
    ("null, a range and a share", objects((A, None), (B, "4-5"), (C, "90%")), [], {OUT_OF_SCALE: 3}),
    ("the example repeated", objects(("first passage", 3), ("second passage", 5)), [], {NOT_IN_RESPONSE: 2}),
    ("two lists", objects((A, 5), (C, 2)) + objects((A, 1), (C, 1)), FULL[::2], {NOT_IN_RESPONSE: 2}),
    ("a sum below the lines", f"{A}: 5\n{B}: 4\n{C}: 2\nTotal: 11", FULL, {OUT_OF_SCALE: 1}),
    ("an empty list", "[]", [], {NO_PARTS: 1}),
    ("prose with quotations", f'The passage "{A}" deserves a 5, while "{C}" gets only 2 points.', [], {NO_PARTS: 1}),
    ("tags", f"<part score=5>{A}</part>\n<part score=2>{C}</part>", [], {NO_PARTS: 1}),
]


@pytest.mark.parametrize(
    ("answer", "spans", "problems"),
    [case[1:] for case in WELL_FORMED + MALFORMED],
    ids=[case[0] for case in WELL_FORMED + MALFORMED],
)
def test_recorded_answers(answer: str, spans: list[tuple[str, float]], problems: dict[str, int]) -> None:
    reading = parse_scores(answer, RESPONSE)
    assert [(RESPONSE[span.start : span.end], span.score) for span in reading.spans] == spans
    assert dict(reading.problems) == problems


CODE = 'def f(d):\n    return {**d, "a": [1, 2]}  # merged {here}\n'
LATEX = r"The mean is $\frac{1}{n}\sum_{i} x_{i}$. Its error is $\sigma/\sqrt{n}$."
PLAIN_JSON = '{"name": "egg", "minutes": 7, "tags": ["boiled", "cold"]}'
SNIPPETS = 'Use {"a": 1}. Then ["x", 3].'

# name, response, its parts, with brackets and braces in them
BRACED: list[tuple[str, str, list[str]]] = [
    ("code", CODE, ["def f(d):", 'return {**d, "a": [1, 2]}', "# merged {here}"]),
    ("one brace without its partner", CODE, ["def f(d):", 'return {**d, "a": [1,', "2]}  # merged {here}"]),
    ("LaTeX", LATEX, [r"The mean is $\frac{1}{n}\sum_{i} x_{i}$.", r"Its error is $\sigma/\sqrt{n}$."]),
    ("JSON", PLAIN_JSON, ['{"name": "egg", "minutes": 7,', '"tags": ["boiled", "cold"]}']),
    ("pieces that look like an answer", SNIPPETS, ['Use {"a": 1}.', 'Then ["x", 3].']),
]
FORMS: list[tuple[str, Callable[[list[tuple[str, int]]], str]]] = [
    ("as asked", lambda scored: objects(*scored)),
    ("over several lines", lambda scored: json.dumps(json.loads(objects(*scored)), indent=1)),
    ("trailing commas", lambda scored: objects(*scored).replace("}]", "},]").replace('"score": 2', '"score": 2,')),
    ("cut off", lambda scored: objects(*scored, ("the {rest", 1))[:-14]),
    ("pairs", lambda scored: json.dumps(scored)),
    ("one object", lambda scored: json.dumps(dict(scored))),
]


@pytest.mark.parametrize("answer", [make for _, make in FORMS], ids=[name for name, _ in FORMS])
@pytest.mark.parametrize(("response", "parts"), [case[1:] for case in BRACED], ids=[case[0] for case in BRACED])
def test_brackets_and_braces_in_a_part_are_text(
    response: str, parts: list[str], answer: Callable[[list[tuple[str, int]]], str]
) -> None:
    scored = [(part, 2 + number) for number, part in enumerate(parts)]
    reading = parse_scores(answer(scored), response)
    assert [(response[span.start : span.end], int(span.score)) for span in reading.spans] == scored
    assert not reading.problems and reading.coverage(len(response)) > 0.85


def test_repeated_text_takes_the_places_in_order() -> None:
    for answer in (objects(("yes", 1), ("no", 3), ("yes", 5)), '{"yes": 1, "no": 3, "yes": 5}'):
        reading = parse_scores(answer, "yes, no, yes")
        found = [(span.start, span.end, span.score) for span in reading.spans]
        assert found == [(0, 3, 1.0), (5, 7, 3.0), (9, 12, 5.0)]
    assert reading.coverage(12) == pytest.approx(8 / 12)


def test_letters_that_fold_to_several_keep_their_places() -> None:
    response = "Die Straße ist naß."
    reading = parse_scores(objects(("STRASSE ist", 4)), response)
    assert [response[span.start : span.end] for span in reading.spans] == ["Straße ist"]


def test_lines_about_snippets_are_read_rather_than_the_snippets() -> None:
    reading = parse_scores('Use {"a": 1}. -> 5\nThen ["x", 3]. -> 2', SNIPPETS)
    assert [(SNIPPETS[span.start : span.end], span.score) for span in reading.spans] == [
        ('Use {"a": 1}.', 5.0),
        ('Then ["x", 3].', 2.0),
    ]
