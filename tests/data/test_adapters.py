"""Rows to pairs: conventions, reasons, and an account of every row of the real files."""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpo.data.adapters import Columns, Note, Reason, RowError, adapt_row
from attnpo.data.base import PairSet, PairSource, log_unused_columns, pairs_from_rows, parse_row_range
from attnpo.schema import SIDES, PreferencePair, UserError, digest
from attnpo.text.traces import TraceHandling
from tests import own_texts

USER = {"role": "user", "content": "Name a colour."}
SYSTEM = {"role": "system", "content": "Be brief."}


def row_to_pair(row: dict[str, Any], columns: Columns | None = None) -> PreferencePair:
    return adapt_row(row, columns or Columns()).pair


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def asked(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


DIALOGUE = [asked("Hi"), said("Hello."), USER]
LABELLED = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Name a colour.\n\nAssistant:"

# name -> row, expected history, expected responses if they are not "Red" and "Two"
CONVENTIONS: dict[str, tuple[Any, ...]] = {
    "full conversations, prompt repeats the question": (
        {"prompt": "Name a colour.", "chosen": [USER, said("Red")], "rejected": [USER, said("Two")]},
        [USER],
    ),
    "full conversations, prompt is the last user turn": (
        {"prompt": "Name a colour.", "chosen": [*DIALOGUE, said("Red")], "rejected": [*DIALOGUE, said("Two")]},
        DIALOGUE,
    ),
    "full conversations, system turn, no prompt column": (
        {"chosen": [SYSTEM, USER, said("Red")], "rejected": [SYSTEM, USER, said("Two")]},
        [SYSTEM, USER],
    ),
    "prompt as messages, answers alone": (
        {"prompt": DIALOGUE, "chosen": [said("Red")], "rejected": [said("Two")]},
        DIALOGUE,
    ),
    "prompt as messages, several turns after it": (
        {"prompt": [asked("Hi")], "chosen": [*DIALOGUE[1:], said("Red")], "rejected": [*DIALOGUE[1:], said("Two")]},
        DIALOGUE,
    ),
    "prompt as messages, repeated in the answers": (
        {"prompt": DIALOGUE, "chosen": [*DIALOGUE, said("Red")], "rejected": [*DIALOGUE, said("Two")]},
        DIALOGUE,
    ),
    "prompt text beside answers as messages": (
        {"prompt": "Name a colour.", "chosen": [said("Red")], "rejected": [said("Two")]},
        [USER],
    ),
    "plain text": ({"prompt": "Name a colour.", "chosen": " Red\n", "rejected": "Two"}, [USER], (" Red\n", "Two")),
    "labelled dialogue": (
        {"chosen": LABELLED + " Red", "rejected": LABELLED + " Reddish"},
        DIALOGUE,
        ("Red", "Reddish"),
    ),
    "labelled dialogue, empty answer": ({"chosen": LABELLED, "rejected": LABELLED + " Two"}, DIALOGUE, ("", "Two")),
    "labelled prompt beside answers": ({"prompt": LABELLED, "chosen": " Red", "rejected": " Two"}, DIALOGUE),
    "labels inside an ordinary prompt are text": (
        {"prompt": "Explain this:\n\nHuman: Hi\n\nAssistant:", "chosen": "Red", "rejected": "Two"},
        [asked("Explain this:\n\nHuman: Hi\n\nAssistant:")],
    ),
    "shared start, cut at a word border": (
        {"chosen": "Name a colour. Answer: redwood", "rejected": "Name a colour. Answer: reddish"},
        [asked("Name a colour. Answer:")],
        ("redwood", "reddish"),
    ),
    "shared start, one text ends inside a word of the other": (
        {"chosen": "Is it? yes", "rejected": "Is it? yesterday"},
        [asked("Is it?")],
        ("yes", "yesterday"),
    ),
    "shared start, a combining mark stays with its letter": (
        {"chosen": "Spell: cafe\u0301", "rejected": "Spell: cafe"},
        [asked("Spell:")],
        ("cafe\u0301", "cafe"),
    ),
    "ShareGPT": (
        {
            "prompt": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Name a colour."}],
            "chosen": {"from": "gpt", "value": "Red"},
            "rejected": {"from": "gpt", "value": "Two"},
        },
        [SYSTEM, USER],
    ),
}


def in_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_content_in_text_parts_is_text() -> None:
    row = {
        "prompt": [{"role": "user", "content": in_parts("Name ", "a colour.")}],
        "chosen": [{"role": "assistant", "content": in_parts("Red")}],
        "rejected": [{"role": "assistant", "content": "Two"}],
    }
    assert row_to_pair(row) == PreferencePair.from_texts([USER], "Red", "Two")


@pytest.mark.parametrize("part", [{"type": "image", "text": "x"}, {"type": "text", "text": None}, {"text": "x"}, "x"])
def test_content_with_another_part_is_not_text(part: Any) -> None:
    answer = {"role": "assistant", "content": [*in_parts("Red"), part]}
    with pytest.raises(RowError, match=Reason.NOT_TEXT.value):
        row_to_pair({"prompt": "Name a colour.", "chosen": [answer], "rejected": [said("Two")]})


def test_a_pair_with_exchanged_sides_is_kept_and_counted() -> None:
    rows = [{"prompt": "p", "chosen": one, "rejected": other} for one, other in ("ab", "cd", "ba", "ab", "ba")]
    found = pairs_from_rows(rows)
    assert (found.num_kept, found.num_dropped) == (5, 0)
    assert found.notes == Counter({Note.EXCHANGED.value: 3, Note.DUPLICATE.value: 2})
    assert found.examples[Note.EXCHANGED.value] == [2, 3, 4]
    assert "swapped: 3 (rows 2, 3, 4)" in found.summary()


REPEATS = "both responses begin with the prompt"
SCORES = "chosen response does not have the higher score"
LEGACY = "function_call next to text is ignored (use tool_calls)"
LEGACY_ALONE = "function_call instead of text (use tool_calls)"
CALL = {**said("I look."), "function_call": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("row", "noticed"),
    [
        ({"prompt": "Say yes.", "chosen": "Say yes. Yes", "rejected": "Say yes.\nNo"}, REPEATS),
        ({"prompt": [asked("Say yes.")], "chosen": "Say yes. Yes", "rejected": "Say yes."}, REPEATS),
        ({"prompt": "Say yes.", "chosen": "Say yes. Yes", "rejected": "No"}, None),
        ({"prompt": "Hi", "chosen": "Hi there", "rejected": "Hi!"}, None),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": 1.0, "score_rejected": 1.0}, SCORES),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": 1, "score_rejected": 3}, SCORES),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "chosen_score": 0.0, "rejected_score": 0.5}, SCORES),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": 2.0, "score_rejected": 1.0}, None),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": None, "score_rejected": 1.0}, None),
        ({"chosen": [USER, said("a")], "rejected": [USER, CALL]}, LEGACY),
        ({"chosen": [USER, said("a")], "rejected": [USER, {**said("b"), "function_call": None}]}, None),
    ],
)  # fmt: skip
def test_rows_that_look_wrong_are_kept_and_counted(row: dict[str, Any], noticed: str | None) -> None:
    found = pairs_from_rows([row, row])
    assert found.num_kept == 2 and "duplicate" in found.summary()
    assert (f"; {noticed}: 2 (rows 0, 1)" in found.summary()) if noticed else set(found.notes) == {Note.DUPLICATE.value}


def test_columns_that_are_not_used_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    (tmp_path / "plain.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    row |= {"score": 1, "chosen_Weights": [1.0], "loss_mask": [1]}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    source = PairSource(str(tmp_path))
    with caplog.at_level(logging.INFO):
        log_unused_columns(PairSource(str(tmp_path / "plain.jsonl")).load("train"))
        assert "data: " not in caplog.text
        pairs = source.load("train")
        source.load("val")
        log_unused_columns(pairs)
    said_of = [record for record in caplog.records if record.message.startswith("data: ")]
    assert [record.levelno for record in said_of] == [logging.INFO, logging.WARNING]
    assert "unused columns: score, chosen_Weights, loss_mask" in said_of[0].message
    assert "chosen_Weights, loss_mask may contain weights but are not used" in said_of[1].message
    assert "weights=column" in said_of[1].message
    caplog.clear()
    with caplog.at_level(logging.INFO):  # those that the weight source reads
        log_unused_columns(pairs, ("chosen_Weights", "loss_mask"))
    assert caplog.messages == ["data: unused columns: score"]


@pytest.mark.parametrize("name", CONVENTIONS)
def test_convention(name: str) -> None:
    row, history, responses = (*CONVENTIONS[name], ("Red", "Two"))[:3]
    columns = Columns(role="from", content="value") if name == "ShareGPT" else Columns()
    adapted = adapt_row(row, columns)
    assert adapted.pair == PreferencePair.from_texts(history, *responses)
    assert (Note.SPLIT in adapted.notes) == name.startswith("shared start"), "only a guessed split is noted"


PROBLEMS: list[tuple[Reason, dict[str, Any]]] = [
    (Reason.MISSING, {"prompt": "p", "chosen": None, "rejected": "b"}),
    (Reason.NOT_TEXT, {"prompt": "p", "chosen": 3, "rejected": "b"}),
    (Reason.NOT_TEXT, {"prompt": 3, "chosen": "a", "rejected": "b"}),
    (Reason.NOT_TEXT, {"chosen": [USER, said("a")], "rejected": [USER, {"role": "assistant", "content": None}]}),
    (Reason.NOT_TEXT, {"chosen": [USER, said("a")], "rejected": [USER, {"role": "assistant", "content": [{}]}]}),
    (Reason.UNICODE, {"prompt": "p", "chosen": "a\ud800", "rejected": "b"}),
    (Reason.UNICODE, {"chosen": [asked("\udfff"), said("a")], "rejected": [asked("\udfff"), said("b")]}),
    (Reason.UNCLOSED, {"prompt": "p", "chosen": "<think>a", "rejected": "b"}),
    (Reason.MALFORMED, {"prompt": "p", "chosen": "a", "rejected": [said("b")]}),
    (Reason.MALFORMED, {"chosen": [], "rejected": []}),
    (Reason.MALFORMED, {"chosen": ["a"], "rejected": ["b"]}),
    (Reason.MALFORMED, {"chosen": [USER, asked("a")], "rejected": [USER, asked("b")]}),
    (Reason.MALFORMED, {"chosen": [USER, said("x"), said("a")], "rejected": [USER, said("x"), said("b")]}),
    (Reason.MALFORMED, {"chosen": [USER, USER, said("a")], "rejected": [USER, USER, said("b")]}),
    (Reason.MALFORMED, {"chosen": [USER, SYSTEM, said("a")], "rejected": [USER, SYSTEM, said("b")]}),
    (Reason.MALFORMED, {"chosen": [{"role": "tool", "content": "x"}, said("a")], "rejected": [USER, said("b")][:1]}),
    (Reason.HISTORIES, {"chosen": [USER, said("a")], "rejected": [asked("Name one."), said("b")]}),
    (Reason.HISTORIES, {"chosen": [USER, said("a")], "rejected": [*DIALOGUE, said("b")]}),
    (Reason.HISTORIES, {"chosen": LABELLED + " Red", "rejected": LABELLED.replace("Hello", "Hey") + " Two"}),
    (Reason.PROMPT, {"prompt": "Name a fish.", "chosen": [USER, said("a")], "rejected": [USER, said("b")]}),
    (Reason.WRITTEN, {"prompt": "p", "chosen": str([said("a")]), "rejected": json.dumps([said("b")])}),
    (Reason.NO_PROMPT, {"chosen": [said("a")], "rejected": [said("b")]}),
    (Reason.NO_PROMPT, {"prompt": [SYSTEM], "chosen": [said("a")], "rejected": [said("b")]}),
    (Reason.NO_PROMPT, {"chosen": "Red", "rejected": "Two"}),
    (Reason.NO_PROMPT, {"prompt": [], "chosen": "Red", "rejected": "Two"}),
    (Reason.IDENTICAL, {"prompt": "p", "chosen": "a", "rejected": "a"}),
    (Reason.IDENTICAL, {"prompt": "p", "chosen": "", "rejected": " \n"}),
    (Reason.IDENTICAL, {"chosen": "p a", "rejected": "p a"}),
    (Reason.IDENTICAL, {"chosen": LABELLED, "rejected": LABELLED}),
    (Reason.TOOLS, {"prompt": [{**USER, "tools": "{}"}], "chosen": "a", "rejected": "b"}),
    (Reason.CALLS, {"chosen": [USER, {**said("a"), "tool_calls": [{}]}], "rejected": [USER, said("b")]}),
]


@pytest.mark.parametrize(("reason", "row"), PROBLEMS)
def test_problem_names_its_reason(reason: Reason, row: dict[str, Any]) -> None:
    with pytest.raises(RowError) as caught:
        row_to_pair(row)
    assert caught.value.reason is reason
    account = pairs_from_rows([row])
    assert (account.read, account.num_kept, account.counts) == (1, 0, Counter({reason.value: 1}))


def test_every_reason_is_reached() -> None:
    assert {reason.value for reason, _ in PROBLEMS} | {LEGACY_ALONE} == {reason.value for reason in Reason}


def test_a_function_call_in_place_of_text_is_named() -> None:
    """Names the form before tool_calls, which has no text in most files."""
    call = {**said("x"), "content": None, "function_call": {"name": "look"}}
    in_answer = {"chosen": [USER, call], "rejected": [USER, said("b")]}
    in_prompt = {"prompt": [USER, call], "chosen": "a", "rejected": "b"}
    assert pairs_from_rows([in_answer, in_prompt]).counts == Counter({LEGACY_ALONE: 2})


def test_one_empty_side_is_kept_and_noted() -> None:
    adapted = adapt_row({"prompt": "p", "chosen": "", "rejected": "b"}, Columns())
    assert (adapted.pair.chosen, adapted.notes) == ("", (Note.EMPTY,))


def test_mapped_columns_and_extra() -> None:
    row = {
        "question": "Name a colour.",
        "good": "Red",
        "bad": "Two",
        "system": "Be brief.",
        "score_chosen": 4.5,
        "topic": "art",
        "messages": [USER, said("Red")],
    }
    pair = row_to_pair(row, Columns(prompt="question", chosen="good", rejected="bad", system="system"))
    assert list(pair.prompt) == [SYSTEM, USER]
    assert pair.extra == {"score_chosen": 4.5, "topic": "art"}
    plain = row_to_pair(
        {**row, "system": " "}, Columns(prompt="question", chosen="good", rejected="bad", system="system")
    )
    assert list(plain.prompt) == [USER]
    with pytest.raises(RowError, match="malformed"):  # two system messages
        turns = {"prompt": [SYSTEM, USER], "chosen": "Red", "rejected": "Two", "system": "Be kind."}
        row_to_pair(turns, Columns(system="system"))


def test_an_input_column_continues_the_prompt() -> None:
    columns = Columns(prompt="instruction", input="input")
    row = {"instruction": "Translate.", "input": "rouge", "chosen": "red", "rejected": "two"}
    assert row_to_pair(row, columns).prompt == (asked("Translate.\nrouge"),)
    for blank in ("", " ", None):
        assert row_to_pair({**row, "input": blank}, columns).prompt == (asked("Translate."),)
    assert row_to_pair(row, columns).extra == {}
    with pytest.raises(RowError, match=Reason.MALFORMED.value):
        row_to_pair({**row, "instruction": [USER]}, columns)


def test_prompt_column_none_ignores_a_prompt() -> None:
    row = {"prompt": "elsewhere", "chosen": [USER, said("Red")], "rejected": [USER, said("Two")]}
    pair = row_to_pair(row, Columns(prompt=None))
    assert list(pair.prompt) == [USER]
    assert pair.extra == {"prompt": "elsewhere"}


def test_missing_columns_name_the_options() -> None:
    with pytest.raises(UserError) as caught:
        row_to_pair({"prompt": "p", "accepted": "a", "bad": "b"}, Columns(rejected="bad"))
    text = str(caught.value)
    assert "accepted, bad, prompt" in text
    assert '"chosen"' in text
    assert "data.columns.chosen=" in text
    assert "data.columns.rejected=" not in text
    with pytest.raises(UserError, match=r"data\.columns\.prompt="):
        row_to_pair({"chosen": "a", "rejected": "b"}, Columns(prompt="question"))


# ------------------------------------------------------------------------------------------------ any row at all


@settings(max_examples=80, deadline=None)
@given(st.text(alphabet="ab .é\u0301\n日", max_size=10), *[st.text(alphabet="ab .\u0301", max_size=5)] * 2)
def test_shared_start_loses_no_text(start: str, first: str, second: str) -> None:
    try:
        pair = row_to_pair({"chosen": start + first, "rejected": start + second})
    except RowError as problem:
        assert problem.reason in (Reason.NO_PROMPT, Reason.IDENTICAL)
        return
    prompt = pair.prompt[0]["content"]
    for text, response in ((start + first, pair.chosen), (start + second, pair.rejected)):
        assert "".join((prompt + response).split()) == "".join(text.split())


# ------------------------------------------------------------------------------------------------ real files


@pytest.fixture(autouse=True, scope="module")
def library_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


# Rows per folder and split as the READMEs have them; duplicates per split (16 repeated rows, as the README says)
ROWS = {
    ("alpaca_eval_pairs", "train"): 638,
    ("alpaca_eval_pairs", "test"): 73,
    ("hh_harmless_test", "train"): 700,
    ("hh_harmless_test", "test"): 100,
    ("llamafactory_demo", "train_en"): 268,
    ("llamafactory_demo", "test_en"): 32,
    ("llamafactory_demo", "train_zh"): 267,
    ("llamafactory_demo", "test_zh"): 33,
    ("ultrafeedback_sample", "train"): 700,
    ("ultrafeedback_sample", "test"): 100,
}
DUPLICATES = {"train_en": 5, "train_zh": 8, "test_zh": 3}


def keeps_every_row(file: Path, duplicates: int = 0) -> int:
    """Reads a file of the hub's conventions and compares every pair with its row; returns how many there are."""
    found = PairSource(str(file.parent), train_split=file.stem).load("train")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    assert (found.read, found.num_kept, found.num_dropped) == (len(rows), len(rows), 0)
    tied = sum(row.get("score_chosen", 1) <= row.get("score_rejected", 0) for row in rows)
    assert found.notes == +Counter({Note.DUPLICATE.value: duplicates, SCORES: tied})
    for pair, row in zip(found.pairs, rows, strict=True):
        assert [*pair.prompt, said(pair.chosen)] == row["chosen"]
        assert [*pair.prompt, said(pair.rejected)] == row["rejected"]
        assert set(pair.extra) == set(row) - {"prompt", "chosen", "rejected", "messages"}
    return len(rows)


def test_rows_of_the_hubs_form_are_kept(tmp_path: Path) -> None:
    rows = own_texts.rows(100)
    rows = [{**row, "score_chosen": 3.0, "score_rejected": float(place % 4)} for place, row in enumerate(rows)]
    lines = [json.dumps(row, ensure_ascii=False) for row in [*rows, *rows[:3]]]
    (tmp_path / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert keeps_every_row(tmp_path / "train.jsonl", duplicates=3) == 103


def test_real_files_keep_every_row(shared: Path) -> None:
    for (folder, split), count in ROWS.items():
        assert keeps_every_row(shared / "data" / folder / f"{split}.jsonl", DUPLICATES.get(split, 0)) == count


def test_edge_cases_are_counted_by_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of fifteen rows every third has equal responses, the next one empty, the first ones two answers in a row."""
    rows, said_twice = own_texts.rows(15), {"role": "assistant", "content": "So."}
    for place, row in enumerate(rows):
        if place % 3 == 0:
            row["rejected"] = row["chosen"]
        elif place % 3 == 1:
            row["rejected"] = [*row["rejected"][:-1], said("")]
        elif place < 9:
            row |= {side: [*row[side][:-1], said_twice, row[side][-1]] for side in SIDES}
    file = tmp_path / "edge_cases.jsonl"
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    with caplog.at_level(logging.INFO):
        found = PairSource(str(file)).load("train")
    assert found.counts == Counter({Reason.IDENTICAL: 5, Reason.MALFORMED: 3}) and found.notes == {Note.EMPTY: 5}
    assert (found.read, found.num_kept, found.num_dropped) == (15, 7, 8)
    assert found.examples[Reason.IDENTICAL] == [0, 3, 6] and found.examples[Reason.MALFORMED] == [2, 5, 8]
    assert [record.levelname for record in caplog.records if found.summary() in record.message] == ["WARNING"]


# ------------------------------------------------------------------------------------------------ sources


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, count in (("train", 10), ("test", 4)):
        rows = [{"prompt": f"{split} {i}", "chosen": "a", "rejected": "b"} for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def prompts(found: PairSet) -> list[str]:
    return [pair.prompt[0]["content"] for pair in found.pairs]


def test_splits_rows_and_fingerprint(folder: Path) -> None:
    source = PairSource(str(folder), train_rows="2:5", val_rows="50%")
    train, val = source.load("train"), source.load("val")
    assert prompts(train) == ["train 2", "train 3", "train 4"]
    assert prompts(val) == ["test 0", "test 1"]
    assert train.fingerprint == digest([pair.pair_id for pair in train.pairs])
    assert train.fingerprint != PairSource(str(folder), train_rows="3:5").load("train").fingerprint
    with pytest.raises(ValueError, match="split"):
        source.load("test")


def test_responses_change_places_where_asked(folder: Path) -> None:
    plain, exchanged = (PairSource(str(folder), exchanged=asked).load("train") for asked in (False, True))
    assert [(pair.chosen, pair.rejected) for pair in exchanged.pairs] == [("b", "a")] * len(plain.pairs)
    assert prompts(exchanged) == prompts(plain) and exchanged.fingerprint != plain.fingerprint
    assert exchanged.unused == plain.unused == ()


def test_row_numbers_are_those_of_the_file(folder: Path) -> None:
    with (folder / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "p", "chosen": "a", "rejected": "a"}) + "\n")
    assert PairSource(str(folder), train_rows="8:").load("train").examples == {Reason.IDENTICAL.value: [10]}


@pytest.mark.parametrize("nested", ["", "data"])
def test_parquet_shards_equal_json(folder: Path, nested: str) -> None:
    import datasets

    table = datasets.Dataset.from_json(str(folder / "train.jsonl"))
    assert isinstance(table, datasets.Dataset)
    place = folder / "hub" / nested
    place.mkdir(parents=True)
    for part in range(2):
        table.shard(2, part).to_parquet(str(place / f"train_prefs-0000{part}-of-00002.parquet"))
    found = PairSource(str(folder / "hub"), train_split="train_prefs").load("train")
    assert found.fingerprint == PairSource(str(folder)).load("train").fingerprint


def test_single_file_needs_a_share_for_validation(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(folder / "train.jsonl")
    with pytest.raises(UserError, match=r"set data\.val_share .*data\.val_rows"):
        PairSource(path).load("val")
    source = PairSource(path, train_rows="0:80%", val_rows="80%:")
    assert prompts(source.load("train")) + prompts(source.load("val")) == [f"train {i}" for i in range(10)]
    assert "data.train_rows overlap" not in caplog.text
    PairSource(path, val_rows="2").load("val")
    assert "data.train_rows overlap" in caplog.text


def test_errors_name_what_is_there(folder: Path) -> None:
    with pytest.raises(UserError, match=r"data\.train_split=train_prefs.*test\.jsonl, train\.jsonl"):
        PairSource(str(folder), train_split="train_prefs").load("train")
    with pytest.raises(UserError, match=r"no such file or folder.*test\.jsonl, train\.jsonl"):
        PairSource(str(folder / "trian.jsonl")).load("train")
    with pytest.raises(UserError, match=r"no such file or folder"):
        PairSource("./nowhere/near/here").load("train")
    (folder / "asked.jsonl").write_text('{"question": "p", "chosen": "a", "rejected": "b"}\n')
    with pytest.raises(UserError, match=r"no prompt: 1 \(row 0\).*data\.columns\.prompt="):
        PairSource(str(folder), train_split="asked").load("train")
    (folder / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="is ambiguous"):
        PairSource(str(folder)).load("train")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        PairSource(str(folder / "train.parquet")).load("train")
    (folder / "pairs.xlsx").write_text("a,b\n")
    with pytest.raises(UserError, match=r"expected a file with the extension .*got pairs\.xlsx"):
        PairSource(str(folder / "pairs.xlsx")).load("train")


def test_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        PairSource("nobody/no-such-pairs", train_split="train_prefs", revision="abc").load("train")
    for part in ("nobody/no-such-pairs", "split train_prefs, revision abc", "train_prefs.jsonl"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (None, range(0, 40)),
        ("5", range(0, 5)),
        ("5:8", range(5, 8)),
        (":8", range(0, 8)),
        ("30:", range(30, 40)),
        ("10%", range(0, 4)),
        ("90%:", range(36, 40)),
        ("10% : 20%", range(4, 8)),
        ("9%", range(0, 3)),
        ("100", range(0, 40)),
    ],
)
def test_row_range(selection: str | None, expected: range) -> None:
    assert parse_row_range(selection, 40) == expected


@pytest.mark.parametrize("selection", ["", ":", "x", "-3", "1:2:3", "1.5", "5:5", "40:", "2%", "0"])
def test_row_range_refuses(selection: str) -> None:
    with pytest.raises(UserError, match=r"data\.val_rows="):
        parse_row_range(selection, 40, "data.val_rows")


def test_asking_for_more_rows_than_there_are_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    parse_row_range("40", 40)
    assert not caplog.records
    parse_row_range("41", 40)
    assert "more rows than the 40 available" in caplog.text


# ---------------------------------------------------------------------------------------------- reasoning traces


def reasoned(trace: str | None, answer: str) -> list[dict[str, object]]:
    return [
        {"role": "user", "content": "Q1"},
        {"role": "assistant", "content": "A1", "reasoning_content": "earlier"},
        {"role": "user", "content": "Q2"},
        {"role": "assistant", "content": answer, "reasoning_content": trace},
    ]


def test_a_trace_beside_the_content_is_that_of_the_response() -> None:
    row = {"chosen": reasoned("why", "good"), "rejected": reasoned(None, "bad")}
    kept = adapt_row(row, Columns())
    assert (kept.pair.chosen, kept.pair.rejected) == ("<think>\nwhy\n</think>\n\ngood", "bad")
    assert [turn.get("reasoning_content") for turn in kept.pair.prompt] == [None, "earlier", None]
    assert not kept.notes
    stripped = adapt_row(row, Columns(traces=TraceHandling.STRIP))
    without = {side: [{**turn, "reasoning_content": None} for turn in turns] for side, turns in row.items()}
    assert stripped.pair == adapt_row(without, Columns()).pair != kept.pair
    assert stripped.notes == (Note.STRIPPED,)


def test_a_trace_weighed_apart_stays_in_its_response_and_marks_its_pair() -> None:
    row = {"chosen": reasoned("why", "good"), "rejected": reasoned(None, "bad")}
    kept, apart = adapt_row(row, Columns()).pair, adapt_row(row, Columns(traces=TraceHandling.WEIGH_APART)).pair
    assert (apart.prompt, apart.chosen, apart.rejected) == (kept.prompt, kept.chosen, kept.rejected)
    assert apart.apart and not kept.apart and apart.pair_id != kept.pair_id
    bare = {side: reasoned(None, side) for side in ("chosen", "rejected")}
    assert adapt_row(bare, Columns(traces=TraceHandling.WEIGH_APART)) == adapt_row(bare, Columns())
    again = pairs_from_rows(
        [row, {"chosen": row["rejected"], "rejected": row["chosen"]}], Columns(traces=TraceHandling.WEIGH_APART)
    )
    assert again.notes[Note.EXCHANGED.value] == 1


@pytest.mark.parametrize("traces", TraceHandling)
def test_a_trace_that_never_ends_drops_its_row(traces: TraceHandling) -> None:
    rows = [
        {"prompt": "Q", "chosen": "<think>a</think>b", "rejected": "<think>c"},
        {"prompt": "Q", "chosen": "<think>a</think>b", "rejected": "<think>c</think>b"},
        {"prompt": "Q", "chosen": "<think>a</think>b", "rejected": "d"},
    ]
    found = pairs_from_rows(rows, Columns(traces=traces))
    strip = traces is TraceHandling.STRIP
    assert found.counts == {"reasoning trace is not closed": 1} | ({"identical responses": 1} if strip else {})
    assert found.pairs[-1].chosen == ("b" if strip else "<think>a</think>b")
    noted = {TraceHandling.KEEP: {}, TraceHandling.STRIP: {"reasoning trace stripped": 1}}
    assert found.notes == noted.get(traces, {"reasoning trace excluded from weighting": 2})


# ---------------------------------------------------------------------------------------------- tools

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm"}}}


def used(*more: dict[str, object], **of_call: object) -> list[dict[str, object]]:
    """A question, the call of a tool, its result, and ``more``."""
    return [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], **of_call},
        {"role": "tool", "content": "wet", "name": "weather", "tool_call_id": "1"},
        *more,
    ]


def test_tools_stand_with_the_first_turn_of_the_prompt() -> None:
    row = {"prompt": "Rain?", "chosen": "No.", "rejected": "Yes.", "tools": [{**TOOL, "strict": None}], "note": "s"}
    columns = Columns(tools="tools", system="note")
    pair = adapt_row(row, columns).pair
    assert [turn.get("tools") for turn in pair.prompt] == [json.dumps([TOOL]), None]
    assert adapt_row({**row, "tools": json.dumps([TOOL])}, columns).pair == pair
    without = adapt_row({**row, "tools": None}, columns).pair
    assert without.pair_id == adapt_row(row, Columns(system="note")).pair.pair_id != pair.pair_id
    assert adapt_row({**row, "tools": []}, columns).pair == adapt_row({**row, "tools": "  "}, columns).pair == without
    assert columns.find_unmapped(row) == [] and Columns(system="note").find_unmapped(row) == ["tools"]
    for wrong in ("weather", {"name": "weather"}, ["weather"], 1):
        with pytest.raises(RowError, match=Reason.TOOLS.value):
            adapt_row({**row, "tools": wrong}, columns)
    with pytest.raises(UserError, match=r'no column "tools".*data\.columns\.tools=COLUMN'):
        adapt_row({"prompt": "Q", "chosen": "a", "rejected": "b"}, Columns(tools="tools"))
    # A prompt that attnpo.generate has written needs no column.
    assert adapt_row({"prompt": list(pair.prompt), "chosen": "No.", "rejected": "Yes."}, Columns()).pair == pair


def test_calls_and_results_are_turns_of_the_prompt() -> None:
    row = {"prompt": used(), "chosen": "No.", "rejected": "Yes."}
    pair = adapt_row(row, Columns()).pair
    assert pair.prompt[1] == {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])}
    assert pair.prompt[2] == {"role": "tool", "content": "wet", "tool_call_id": "1", "name": "weather"}
    twice = [*used(), *used()[1:], {"role": "assistant", "content": "No."}, {"role": "user", "content": "Sure?"}]
    # A second call may follow a result.
    assert len(adapt_row({**row, "prompt": twice}, Columns()).pair.prompt) == 7
    assert adapt_row({**row, "prompt": used()}, Columns(traces=TraceHandling.STRIP)).pair == pair
    answered = used({"role": "assistant", "content": "No."})
    whole = {"chosen": answered, "rejected": used({"role": "assistant", "content": "Yes."})}
    assert adapt_row(whole, Columns()).pair == pair


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (used(tool_calls="{"), Reason.MALFORMED),  # no JSON
        (used(tool_calls=[]), Reason.NOT_TEXT),  # neither content nor a call
        (used(tool_calls=[], content="a"), Reason.MALFORMED),  # a result of no call
        (used()[:2], Reason.MALFORMED),  # a call without a result
        ([*used()[:2], {"role": "user", "content": "b"}], Reason.MALFORMED),
        (used({"role": "user", "content": "b"}), Reason.MALFORMED),
    ],
)
def test_turns_of_tools_in_no_order(turns: list[dict[str, object]], reason: Reason) -> None:
    with pytest.raises(RowError, match=reason.value):
        adapt_row({"prompt": turns, "chosen": "No.", "rejected": "Yes."}, Columns())


def test_an_answer_that_calls_a_tool_is_no_text_to_train_on() -> None:
    answers = {"chosen": used()[:2], "rejected": [used()[0], {"role": "assistant", "content": "Yes."}]}
    found = pairs_from_rows([answers], Columns())
    assert found.counts == {"response calls a tool": 1} and not found.pairs
