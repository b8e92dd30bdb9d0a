"""The examples of docs/data.md, read through the configuration that their commands compose."""

import re
import shlex
from pathlib import Path

import pytest

from attnpo.config.compose import load
from attnpo.data.adapters import Reason
from attnpo.data.base import PairSet, PairSource
from attnpo.text.template import get_tools

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
EXAMPLES = {
    name: (content, command)
    for name, content, command in re.findall(
        r"^`own/([\w.]+)`\n```\w+\n(.*?)^```\n```\n(python .*?)^```", PAGE, re.MULTILINE | re.DOTALL
    )
}
PLAIN = [("Name a colour.", "Red.", "Two."), ("Is water wet?", "Yes, it is.", "Blue."), ("Say hi.", "Hi!", "No.")]
EXPECTED = {
    **dict.fromkeys(
        ("texts.jsonl", "messages.jsonl", "conversations.jsonl", "dialogues.jsonl", "sharegpt.jsonl", "tools.jsonl"),
        PLAIN,
    ),
    "instructions.jsonl": [
        ("Name a colour.", "Red.", "Two."),
        ("Translate into English.\nrouge", "red", "two"),
        ("Continue.\nOne, two,", "three.", "blue."),
    ],
    "sheet.csv": [PLAIN[0], ("Six times seven, please?", "42", 'A "number",\nI think.'), PLAIN[2]],
}


def texts(found: PairSet) -> list[tuple[str, str, str]]:
    assert all(len(pair.prompt) == 1 and pair.prompt[0]["role"] == "user" for pair in found.pairs)
    return [(pair.prompt[0]["content"], pair.chosen, pair.rejected) for pair in found.pairs]


def test_there_is_an_example_for_each_convention() -> None:
    assert EXAMPLES.keys() == EXPECTED.keys()
    assert len(re.findall(r"^### \d\. ", PAGE, re.MULTILINE)) == len(EXAMPLES) - 2 == 6


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_is_read_by_its_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, command = EXAMPLES[name]
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / name).write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    source = load("fit", shlex.split(command.replace("\\\n", " "))[3:]).data
    assert isinstance(source, PairSource) and source.path == f"own/{name}"
    train, val = source.load("train"), source.load("val")
    assert (train.num_dropped, val.num_dropped, len(train), len(val)) == (0, 0, 2, 1)
    assert not train.notes and not train.unused
    assert sorted(texts(train) + texts(val)) == sorted(EXPECTED[name])
    known = [tool["function"]["name"] for pair in train.pairs + val.pairs for tool in get_tools(pair.prompt) or []]
    assert sorted(known) == (["paint", "touch"] if name == "tools.jsonl" else [])


def test_every_reason_is_explained() -> None:
    table = PAGE.partition("| reason | what to look at |")[2]
    assert {row for row in re.findall(r"^\| (\w[^|]*) \|", table, re.MULTILINE)} == {reason.value for reason in Reason}
