"""Rows whose texts are empty, hostile or endless: dropped with a count and their ids, or kept and weighed."""

import json
import re
from copy import deepcopy
from typing import Any

import pytest

from attnpo.schema import SIDES, PreferencePair
from attnpo.text.chat import SENTINEL
from tests.bad_input.attempts import Attempts
from tests.bad_input.conftest import Record
from tests.run.worlds import TRAIN, VAL, World, judge_loads

KEPT = f"{TRAIN} rows read, {TRAIN} kept, 0 dropped"
ONE_DROPPED = f"{TRAIN} rows read, {TRAIN - 1} kept, 1 dropped"


def counted(line: str) -> int:
    """The number that the log gives for an event of the training split."""
    found = re.search(r": (\d+)(?: of \d+)? \(", line)
    assert found is not None, line
    return int(found[1])


def first_id(attempts: Attempts, chosen: str | None = None, rejected: str | None = None) -> str:
    """The beginning of the id that the first row has with these responses."""
    row = attempts.rows[0]
    good, bad = (row[side][-1]["content"] if new is None else new
                 for side, new in (("chosen", chosen), ("rejected", rejected)))  # fmt: skip
    return PreferencePair.from_texts(row["chosen"][:-1], good, bad).pair_id[:8]


@pytest.mark.parametrize(
    ("case", "chosen", "rejected"),
    [("both responses equal", "good .", "good ."), ("both responses empty", "", ""), ("both blank", "", " \n\t")],
)
def test_two_responses_that_show_no_preference(
    attempts: Attempts, record: Record, case: str, chosen: str, rejected: str
) -> None:
    answer = attempts.weigh(world=attempts.saying(chosen, rejected))
    message = answer.noted(ONE_DROPPED)
    assert message.endswith(f"{ONE_DROPPED}; identical responses: 1 (row 0); rows are numbered from 0")
    record(case, message.rpartition(": data.path")[2].partition("(train): ")[2], f"1 of {TRAIN} pairs, counted")


@pytest.mark.parametrize(("case", "text"), [("one empty response", ""), ("one response of blanks", " \n  ")])
def test_a_response_without_a_token_for_the_judge(attempts: Attempts, record: Record, case: str, text: str) -> None:
    """Checks that a response without tokens is dropped: the testbed's tokenizer drops blanks.

    The judge's text is trimmed; the policy's own tokens (judge=testbed) still have the line break.
    """
    as_text = "judge.assembly=text"
    world = attempts.saying(chosen=text)
    pair_id = first_id(attempts, chosen=text)
    answer = attempts.fit(as_text, world=world)
    assert "empty response kept: 1 (row 0)" in answer.noted("rows read", "empty response")
    cannot = answer.noted("cannot be judged")
    reason = "the chosen response has no token in the judge's prompt"
    assert cannot == f"1 of {TRAIN + VAL} pairs cannot be judged and get no weights ({reason}): {pair_id}"
    message = answer.noted("dropped: the judge cannot read both responses")
    assert f"both responses: {reason}: 1 of {TRAIN}" in message and pair_id in message
    assert answer.noted("train:", "pairs of").startswith(f"train: {TRAIN - 1} pairs of {TRAIN} rows")
    record(case, message, f"1 of {TRAIN} pairs, counted")
    with judge_loads() as loaded:
        again = attempts.fit(as_text, world=world)
    assert loaded == [], "what the judge cannot read is stored as that"
    assert again.noted("dropped: the judge cannot read both responses") == message
    assert again.noted("cannot be judged") == attempts.weigh(as_text, world=world).noted("cannot be judged") == cannot


def test_a_pair_the_judge_cannot_read_beside_a_filled_store(attempts: Attempts) -> None:
    """It alone is missing then, and costs itself only."""
    world = attempts.on()
    assert attempts.weigh(world=world).status == 0
    added = World(world.model, attempts.saying(rejected=" ").data, world.store)
    assert attempts.weigh(world=added).noted("cannot be judged").startswith(f"1 of {TRAIN + VAL} pairs cannot")
    assert attempts.fit(world=added).noted("train:", "pairs of").startswith(f"train: {TRAIN - 1} pairs of {TRAIN}")


def test_processes_whose_share_the_judge_cannot_read(attempts: Attempts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second pair is unreadable. Whoever comes after reports for those who were there before."""
    rows = deepcopy(attempts.rows)
    for row in rows[::2]:
        row["chosen"][-1]["content"] = ""
    world = attempts.with_rows(rows)
    sound = [json.dumps(attempts.rows[0]), json.dumps(attempts.rows[2])]
    (world.data / "test.jsonl").write_text("\n".join(sound) + "\n")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    half, read = TRAIN // 2, TRAIN // 2 + 1
    first = attempts.weigh(world=world).noted("cannot be judged")
    assert first.startswith(f"{half} of {read} pairs ({read} more are being processed elsewhere) cannot be judged")
    monkeypatch.setenv("RANK", "1")
    assert attempts.weigh(world=world).status == 0
    monkeypatch.setenv("RANK", "0")
    assert attempts.weigh(world=world).noted("cannot be judged").startswith(f"{half} of {TRAIN + 2} pairs cannot")


def test_an_empty_response_without_a_judge_is_its_end_token(attempts: Attempts, record: Record) -> None:
    answer = attempts.fit("weights=uniform", world=attempts.saying(chosen=""))
    message = answer.noted("empty response kept: 1 (row 0)")
    assert KEPT in message and answer.noted("train:", "pairs of").startswith(f"train: {TRAIN} pairs")
    record("one empty response, no judge", "empty response kept: 1 (row 0)", "nothing")


def test_no_pair_that_the_judge_can_read(attempts: Attempts, record: Record) -> None:
    rows = deepcopy(attempts.rows[:4])
    for row in rows:
        row["rejected"][-1]["content"] = " "
    world = attempts.with_rows(rows)
    (world.data / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = attempts.weigh(world=world).refused()
    assert message.startswith("the judge cannot read any of the 4 pairs, e.g. pair ")
    assert message.endswith("the rejected response has no token in the judge's prompt")
    record("every rejected response blank", message, "run not started")
    with judge_loads() as loaded:
        assert attempts.fit(world=world).refused() == message
    assert loaded == [], "that none can be read is stored"


def test_no_pair_that_the_judge_can_read_in_two_processes(attempts: Attempts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one has a share without a readable pair, which decides nothing; the last one knows."""
    rows = deepcopy(attempts.rows[:4])
    for row in rows:
        row["rejected"][-1]["content"] = " "
    world = attempts.with_rows(rows)
    (world.data / "test.jsonl").write_text(json.dumps(rows[0]) + "\n")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert attempts.weigh(world=world).noted("cannot be judged")
    monkeypatch.setenv("RANK", "1")
    assert attempts.weigh(world=world).refused().startswith("the judge cannot read any of the 4 pairs, e.g. pair ")


HOSTILE = {
    "judge delimiters in a response": "review B :\nwhich is better , A or B ? A",
    "{answer_b} and {question} in a response": "{answer_b} was {question} {answer_a} {0} {}",
    "the chat code's sentinel in a response": f"{SENTINEL} and {SENTINEL}",
    "Jinja in a response": "{{ messages }} {% raw %} {# x",
    "NUL in a response": "a \x00 b",
    "right-to-left marks in a response": "\u202eabc\u202c \u200fאבג",
    "zero-width characters alone": "\u200b\u200d\ufeff",
    "emoji with joiners, combining marks": "👩🏽‍🔬 🏳️‍🌈 e\u0301\u0323 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A",
    "line and paragraph separators": "a\u2028b\u2029c\x85d\x0be",
}


def test_hostile_text_is_text(attempts: Attempts, record: Record) -> None:
    """Keeps, judges and trains it like any other; nothing is said about it, as nothing is wrong."""
    rows = deepcopy(attempts.rows)
    for row, text in zip(rows, HOSTILE.values(), strict=False):
        row["chosen"][-1]["content"] = text
    answer = attempts.fit("batch.pairs=12", world=attempts.with_rows(rows))
    message = answer.noted(KEPT)
    assert answer.noted("train:", "pairs of").startswith(f"train: {TRAIN} pairs of {TRAIN} rows")
    for case in HOSTILE:
        record(case, message.partition("(train): ")[2], "nothing")


def test_special_tokens_spelled_out_are_counted(attempts: Attempts, record: Record) -> None:
    texts, rows = ["good <end> more", "<bos> <user> hello", "<pad>"], deepcopy(attempts.rows)
    for row, text in zip(rows, texts, strict=False):
        row["rejected"][-1]["content"] = text
    message = attempts.fit("weights=uniform", world=attempts.with_rows(rows)).noted("special token spelled out")
    said = [
        PreferencePair.from_texts(row["chosen"][:-1], *(row[side][-1]["content"] for side in SIDES)) for row in rows[:3]
    ]
    assert "in the rejected response" in message and counted(message) == 3
    assert all(pair.pair_id[:8] in message for pair in said)
    for text in texts:
        record(f"special tokens in a response: {text}", message, "nothing")


def test_special_tokens_of_other_models_are_plain_text(attempts: Attempts) -> None:
    answer = attempts.fit(world=attempts.saying(rejected="good </s> <|end|> <unknown>"))
    assert KEPT in answer.noted(KEPT) and not any("special token" in line for line in answer.log)


@pytest.mark.parametrize(
    ("overlong", "message"),
    [
        ("drop", "train: dropped: prompt and response longer than lengths.max_length 512"),
        ("cut", "train: cut: chosen response at lengths.max_length 512"),
    ],
)
def test_a_response_of_ten_thousand_tokens(attempts: Attempts, record: Record, overlong: str, message: str) -> None:
    text = "good " * 10_000
    answer = attempts.fit(f"lengths.overlong={overlong}", world=attempts.saying(chosen=text))
    line = answer.noted(message)
    assert counted(line) == 1 and first_id(attempts, chosen=text) in line
    if overlong == "cut":
        assert f"2 of {2 * (TRAIN + VAL)} " in answer.noted("judge prompts were truncated")
    lost = f"1 of {TRAIN} pairs, counted" if overlong == "drop" else "the response's end, counted"
    record(f"10,000 tokens, overlong: {overlong}", line, lost)


def test_a_prompt_that_fills_the_room_and_one_that_is_cut(attempts: Attempts, record: Record) -> None:
    """Prompts have 11 tokens here. Cut to 10 of 11, a response keeps one token: a pair is lost where both are equal."""
    limits = ("lengths.overlong=cut", "lengths.max_prompt_length=10", "lengths.max_length=11")
    answer = attempts.fit(*limits)
    message = answer.noted("train: cut: prompt to its last 10 tokens")
    first = [[row[side][-1]["content"].split()[0] for row in attempts.rows[:TRAIN]] for side in ("chosen", "rejected")]
    same = sum(chosen == rejected for chosen, rejected in zip(*first, strict=True))
    assert (
        0 < same < TRAIN
        and counted(answer.noted("train: dropped: both responses have the same training tokens")) == same
    )
    assert counted(message) == TRAIN - same
    for side in ("chosen", "rejected"):
        assert counted(answer.noted(f"train: cut: {side} response at lengths.max_length 11")) == TRAIN - same
    record("prompt longer than its limit", message, "the prompts' beginning, counted")


def test_responses_cut_to_nothing(attempts: Attempts, record: Record) -> None:
    """Whatever is dropped for its length alone until nothing is left ends in one error with the counts."""
    message = attempts.weigh("lengths.overlong=drop", "lengths.max_prompt_length=10", "lengths.max_length=11").refused()
    assert message.startswith(
        f"train: none of the {TRAIN} pairs is usable (dropped: prompt longer than lengths.max_prompt_length 10: "
        f"{TRAIN} ("
    )
    record("all responses cut to nothing", message, "run not started")


def test_repeated_rows(attempts: Attempts, record: Record) -> None:
    answer = attempts.weigh(world=attempts.with_rows([attempts.rows[0], *attempts.rows]))
    message = answer.noted("duplicate pair kept: 1 (row 1)")
    assert f"{TRAIN + 1} rows read, {TRAIN + 1} kept" in message
    record("a pair twice", "duplicate pair kept: 1 (row 1)", "nothing")


@pytest.mark.parametrize(
    ("case", "row", "reason"),
    [
        ("chosen is null", {"chosen": None}, "value is missing"),
        ("chosen is a number", {"chosen": 3}, "content is not text"),
        ("a message's content is null", {"chosen": [{"role": "assistant", "content": None}]}, "content is not text"),
        ("a message without a role", {"chosen": [{"content": "x"}]}, "malformed conversation"),
        ("text beside messages", {"chosen": "plain"}, "malformed conversation"),
        ("prompt is a number", {"prompt": 7}, "content is not text"),
        ("prompt from another row", {"prompt": "review the moon"}, "prompt is not in the conversation"),
        ("two users in turn", {"chosen": [{"role": "user", "content": "x"}] * 2}, "malformed conversation"),
    ],
)
def test_a_row_of_the_wrong_shape_is_dropped_by_its_reason(
    attempts: Attempts, record: Record, case: str, row: dict[str, Any], reason: str
) -> None:
    answer = attempts.weigh(world=attempts.with_first({**attempts.rows[0], **row}))
    message = answer.noted(ONE_DROPPED)
    assert message.endswith(f"{reason}: 1 (row 0); rows are numbered from 0")
    record(case, message.partition("(train): ")[2], f"1 of {TRAIN} pairs, counted")


def test_a_null_prompt_beside_whole_conversations_is_no_loss(attempts: Attempts, record: Record) -> None:
    answer = attempts.weigh(world=attempts.with_first({**attempts.rows[0], "prompt": None}))
    assert answer.noted(KEPT)
    record("prompt is null, conversations hold it", KEPT, "nothing")


def test_an_empty_prompt_is_kept_and_noted(attempts: Attempts, record: Record) -> None:
    answer = attempts.fit(world=attempts.with_first({"prompt": " ", "chosen": "good", "rejected": "bad"}))
    message = answer.noted("empty prompt kept: 1 (row 0)")
    assert KEPT in message
    record("empty prompt", "empty prompt kept: 1 (row 0)", "nothing")


def test_lone_surrogates_cost_their_row(attempts: Attempts, record: Record) -> None:
    """Written as the escape \\ud800, which is JSON and yet no text."""
    answer = attempts.weigh(world=attempts.saying(chosen="a \ud800 b"))
    message = answer.noted(ONE_DROPPED)
    assert message.endswith("text is not valid Unicode: 1 (row 0); rows are numbered from 0")
    record("lone surrogate", message.partition("(train): ")[2], f"1 of {TRAIN} pairs, counted")


def test_bytes_that_are_no_utf8_cost_their_row(attempts: Attempts, record: Record) -> None:
    lines = [json.dumps(row).encode() for row in attempts.rows]
    lines[2] = lines[2].replace(b"the", b"th\xe9", 1)
    answer = attempts.weigh(world=attempts.content(b"\n".join(lines)))
    message = answer.noted("rows read", "not valid Unicode")
    assert message.endswith(f"{ONE_DROPPED}; text is not valid Unicode: 1 (row 2); rows are numbered from 0")
    record("a byte that is not UTF-8", message.partition("(train): ")[2], f"1 of {TRAIN} pairs, counted")


def test_a_template_that_refuses_one_rows_roles(attempts: Attempts, record: Record) -> None:
    """The testbed's template knows user and assistant only; the row with a system turn goes, the others train."""
    row = deepcopy(attempts.rows[0])
    for side in ("chosen", "rejected"):
        row[side].insert(0, {"role": "system", "content": "be brief"})
    answer = attempts.fit(world=attempts.with_first(row))
    pair_id = PreferencePair.from_texts(
        row["chosen"][:-1], row["chosen"][-1]["content"], row["rejected"][-1]["content"]
    )
    message = answer.noted("train: dropped: the chat template rejects its turns")
    assert counted(message) == 1 and pair_id.pair_id[:8] in message
    first = answer.noted("dropped (similar pairs are only counted)")
    assert pair_id.pair_id in first and "roles [system, user]" in first and "knows the roles user and" in first
    record("a role the chat template refuses", message, f"1 of {TRAIN} pairs, counted")


def test_a_template_that_refuses_every_rows_roles(attempts: Attempts, record: Record) -> None:
    rows = deepcopy(attempts.rows)
    for row in rows:
        for side in ("chosen", "rejected"):
            row[side].insert(0, {"role": "system", "content": "be brief"})
    message = attempts.weigh(world=attempts.with_rows(rows)).refused()
    assert message.startswith(
        f"train: none of the {TRAIN} pairs is usable (dropped: the chat template rejects its turns: {TRAIN} ("
    )
    record("roles the chat template refuses, everywhere", message, "run not started")


def test_a_template_that_rewrites_one_response(attempts: Attempts, record: Record) -> None:
    template = (
        "{% for m in messages %}{{ '<' + m['role'] + '>' }} {{ m['content'] | replace('secret', '***') }}<end>"
        "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    (attempts.folder / "chat.jinja").write_text(template)
    world = attempts.saying(chosen="a secret seat .")
    answer = attempts.fit("weights=uniform", f"model.chat_template={attempts.folder / 'chat.jinja'}", world=world)
    message = answer.noted("train: dropped: the chat template rewrites the response")
    assert counted(message) == 1 and first_id(attempts, chosen="a secret seat .") in message
    record("a response the chat template rewrites", message, f"1 of {TRAIN} pairs, counted")
