"""Prompts from rows of every kind; nothing is lost without a reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from attnpo.data.base import PairSource
from attnpo.data.prompts import REPEATED, PromptColumns, PromptSource, prompts_from_rows
from attnpo.schema import UserError
from tests.own_texts import rows

ASK = {"role": "user", "content": "why?"}
TOLD = {"role": "assistant", "content": "so."}
NO = {"role": "assistant", "content": "no."}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "contents"),
    [
        ({"prompt": "why?"}, ["why?"]),
        ({"prompt": [ASK]}, ["why?"]),
        ({"prompt": [ASK, TOLD, ASK]}, ["why?", "so.", "why?"]),
        ({"prompt": "\n\nHuman: why?\n\nAssistant: so.\n\nHuman: and?\n\nAssistant:"}, ["why?", "so.", "and?"]),
        ({"prompt": "why?", "chosen": "a", "rejected": "b"}, ["why?"]),
        (
            {"prompt": "why?", "chosen": [ASK, TOLD, ASK, TOLD], "rejected": [ASK, TOLD, ASK, NO]},
            ["why?", "so.", "why?"],
        ),
        ({"prompt": "why?", "chosen": "only one side"}, ["why?"]),
    ],
)
def test_every_convention_gives_its_prompt(row: dict[str, Any], contents: list[str]) -> None:
    (prompt,) = prompts_from_rows([row], PromptColumns()).prompts
    assert [turn["content"] for turn in prompt.messages] == contents
    assert prompt.messages[-1]["role"] == "user" and len(prompt.id) == 32


def test_every_row_is_accounted_for() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "why?"},
        {"prompt": None},
        {"prompt": "  \n"},
        {"prompt": [ASK, TOLD]},
        {"prompt": []},
        {"prompt": "why?"},
        {"prompt": 7},
        {"prompt": "\ud800"},
    ]
    found = prompts_from_rows(rows, PromptColumns(), first=10)
    assert (found.read, len(found.prompts), found.repeated) == (8, 1, [15])
    assert found.left_out == {
        "value is missing": [11],
        "empty prompt": [12],
        "malformed conversation": [13],
        "no prompt": [14],
        "content is not text": [16],
        "text is not valid Unicode": [17],
    }
    assert found.read == len(found.prompts) + sum(found.counts.values())
    assert f"{REPEATED}: 1 (row 15)" in found.summary()


def test_ids_come_from_a_column_and_are_unique() -> None:
    columns = PromptColumns(prompt="text", id="uid", system="sys")
    found = prompts_from_rows([{"uid": 7, "text": "why?", "sys": "Be short."}], columns)
    assert found.prompts[0].id == "7" and found.prompts[0].messages[0]["content"] == "Be short."
    rows = [{"uid": 7, "text": "a", "sys": None}, {"uid": 7, "text": "a", "sys": None}]
    assert prompts_from_rows(rows, columns).repeated == [1]
    with pytest.raises(UserError, match="row 1 has the same uid '7' as an earlier row but a different prompt"):
        prompts_from_rows([rows[0], {"uid": 7, "text": "b", "sys": None}], columns)


def test_files_folders_and_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"number {n}"} for n in range(5)]
    write(tmp_path / "test.jsonl", rows)
    for path in (tmp_path, tmp_path / "test.jsonl"):
        found = PromptSource(str(path), rows="1:3").load()
        assert [prompt.messages[0]["content"] for prompt in found.prompts] == ["number 1", "number 2"]


def test_prompts_of_a_pairs_folder_are_those_of_its_pairs(tmp_path: Path) -> None:
    """Dialogues: system turns, several turns, and a prompt column that holds the last turn alone."""
    some = rows(60)
    turned = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in some[:9]]
    write(tmp_path / "train.jsonl", [*some, *turned])
    pairs = PairSource(str(tmp_path)).load("train").pairs
    found = PromptSource(str(tmp_path), split="train").load()
    expected = []
    for pair in pairs:
        if pair.prompt not in expected:
            expected.append(pair.prompt)
    assert [prompt.messages for prompt in found.prompts] == expected
    assert len({len(messages) for messages in expected}) > 2
    assert len(found.repeated) == len(pairs) - len(expected) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({"split": "train"}, "data.split=train: .* has no file train.jsonl"),
        ({"columns": PromptColumns(id="uid")}, 'has no column "uid"; .*data.columns.id=COLUMN'),
        ({"columns": PromptColumns(prompt="text")}, 'has no column "text"; columns found: prompt; .*columns.prompt='),
        ({"rows": "9:"}, r'data.rows="9:" selects no rows'),
        ({"rows": "1"}, "has no usable prompts: 1 rows read, 0 prompts; empty prompt: 1"),
    ],
)
def test_what_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write(tmp_path / "test.jsonl", [{"prompt": ""}, {"prompt": "why?"}])
    with pytest.raises(UserError, match=message):
        PromptSource(**{"path": str(tmp_path), **settings}).load()
