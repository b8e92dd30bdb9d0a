"""Answers and scores that a repeated command takes up, damaged or edited by hand: each is noticed, none is used."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnpo import generate, pair
from attnpo.cli.entry import run_entry
from tests.run.worlds import GRAMMAR, World, build_world

Row = dict[str, Any]
Rows = list[Any]
Damage = Callable[[Rows], Rows]
MAINS: dict[str, Any] = {"generate": generate.main, "pair": pair.main}


def edit_row(at: int, **values: object) -> Damage:
    """Writes other values into a row."""
    return lambda rows: [{**row, **values} if place == at else row for place, row in enumerate(rows)]


def change_value(at: int, name: str, to: Callable[[Any], object]) -> Damage:
    """Writes into a row what ``to`` makes of its value."""
    return lambda rows: edit_row(at, **{name: to(rows[at][name])})(rows)


def exchange(one: int, other: int, *names: str) -> Damage:
    """Exchanges the values of two rows."""

    def exchange(rows: Rows) -> Rows:
        first, second = ({name: row[name] for name in names} for row in (rows[one], rows[other]))
        return edit_row(other, **first)(edit_row(one, **second)(rows))

    return exchange


def add_row(at: int, **values: object) -> Damage:
    """Adds a row once more, with other values."""
    return lambda rows: [*rows, {**rows[at], **values}]


def place_of(which: Callable[..., int], rows: Rows) -> int:
    """Returns the row with the least or the largest score."""
    return which(range(len(rows)), key=lambda at: rows[at]["score"])


LINES: dict[str, Damage] = {
    "order: all turned round": lambda rows: rows[::-1],
    "order: first line last": lambda rows: [*rows[1:], rows[0]],
    "ids: another row's": lambda rows: edit_row(0, id=rows[2]["id"], draw=rows[2]["draw"])(rows),
    "ids: another draw": edit_row(0, draw=7),
    "ids: a line twice": lambda rows: [rows[0], *rows],
    "ids: exchanged": exchange(0, 4, "id"),
    "nulls: a line": lambda rows: [None, *rows[1:]],
    "nulls: an id": edit_row(1, id=None),
    "counts: a line less": lambda rows: rows[:-1],
}
ANSWERS: dict[str, Damage] = {
    **LINES,
    "letters: one in an answer": change_value(1, "answer", lambda text: f"x{text[1:]}"),
    "letters: one in a prompt": change_value(0, "prompt", lambda turns: [{**turns[0], "content": "x"}]),
    "order: answers of one prompt exchanged": exchange(0, 1, "answer"),
    "order: answers of two prompts exchanged": exchange(0, 4, "answer", "tokens", "finish_reason"),
    "ids: a second line under one": add_row(0, answer="another"),
    "nulls: an answer": edit_row(1, answer=None),
    "counts: a token more": change_value(0, "tokens", lambda count: count + 1),
}
SCORES: dict[str, Damage] = {
    **LINES,
    "scores: a little more": change_value(1, "score", lambda score: score + 0.5),
    "scores: another sign": change_value(0, "score", lambda score: -score),
    "scores: exchanged": lambda rows: exchange(place_of(min, rows), place_of(max, rows), "score")(rows),
    "scores: a second line under one": add_row(0, score=99.0),
    "scores: null with a reason": edit_row(0, score=None, reason="none"),
    "scores: text": change_value(1, "score", str),
    "scores: no number": edit_row(1, score=float("nan")),
}
# Both commands read answers alike; where nothing of an account is left to compare with, by fewer of the damages.
TAKEN = (
    "order: first line last",
    "ids: a line twice",
    "nulls: an id",
    "letters: one in an answer",
    "counts: a line less",
)
CASES = [
    *(("generate", "answers.jsonl", name, damage) for name, damage in ANSWERS.items()),
    *(("pair", "answers.jsonl", name, ANSWERS[name]) for name in TAKEN),
    *(("pair", "pairs.scores.jsonl", name, damage) for name, damage in SCORES.items()),
]


def rows_of(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def spoil(path: Path, damage: Damage) -> None:
    rows = damage(rows_of(path))
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


class Place:
    """A folder with answers of a tiny model and the pairs made of them, and the commands that wrote both."""

    def __init__(self, folder: Path, world: World) -> None:
        self.folder, self.world = folder, world

    def run(self, entry: str, *more: str) -> int:
        """Returns the exit status of a command that was given before."""
        words = {
            "generate": [
                *(f"model.path={self.world.model}", f"data.path={self.world.store.parent / 'prompts.jsonl'}"),
                *("sampling.max_new_tokens=48", "answers.per_prompt=3", f"output={self.folder}/answers.jsonl"),
            ],
            "pair": [
                *(f"answers.path={self.folder}/answers.jsonl", "ranker=column", "ranker.column=tokens"),
                f"output={self.folder}/pairs.jsonl",
            ],
        }
        return run_entry(MAINS[entry], entry, [*words[entry], "trainer.accelerator=cpu", *more], "", "")

    def contents(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.glob("*.jsonl")}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("world")
    place = Place(root / "sound", build_world(root))
    asked = [{"prompt": prompt.text} for prompt in GRAMMAR.prompts("train")[:3]]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
    assert place.run("generate") == place.run("pair") == 0
    assert len(rows_of(place.folder / "pairs.jsonl")) >= 2
    return place


@pytest.fixture
def place(sound: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Place:
    """A copy of the sound folder."""
    shutil.copytree(sound.folder, tmp_path / "copy")
    capsys.readouterr()
    return Place(tmp_path / "copy", sound.world)


def test_each_damage_changes_the_file(sound: Place) -> None:
    for _, name, _, damage in CASES:
        rows = rows_of(sound.folder / name)
        assert json.dumps(damage(list(rows))) != json.dumps(rows)


@pytest.mark.parametrize(
    ("entry", "name", "damage"), [(*case[:2], case[3]) for case in CASES], ids=[" ".join(case[:3]) for case in CASES]
)
def test_a_damage_is_noticed(
    entry: str,
    name: str,
    damage: Damage,
    sound: Place,
    place: Place,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Refused by the file's name, with nothing changed; or warned of, and made again as it was."""
    file = place.folder / name
    spoil(file, damage)
    if entry == "pair" and name == "answers.jsonl":  # nothing but the answers themselves says what they were
        for made in place.folder.glob("pairs*"):
            made.unlink()
    before = place.contents()
    with caplog.at_level(logging.INFO):
        status = place.run(entry)
    error = capsys.readouterr().err
    if status == 0:
        warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert any(str(file) in line for line in warned), "taken in silence"
        assert place.contents() == sound.contents()
    else:
        assert status == 2 and error.count("\n") == 1 and str(file) in error, error
        assert place.contents() == before


def test_a_damage_of_an_unfinished_file_is_noticed(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    account = place.folder / "answers.json"
    key = json.loads(account.read_text(encoding="utf-8"))["key"]
    account.write_text(json.dumps({"key": key}), encoding="utf-8")
    spoil(place.folder / "answers.jsonl", lambda rows: edit_row(1, answer="another")(rows[:4]))
    assert place.run("generate") == 2
    assert "answers.jsonl, line 2: " in capsys.readouterr().err


@pytest.mark.parametrize("entry", ["generate", "pair"])
def test_a_removed_row_is_made_again(entry: str, sound: Place, place: Place) -> None:
    name = {"generate": "answers.jsonl", "pair": "pairs.scores.jsonl"}[entry]
    spoil(place.folder / name, lambda rows: [*rows[:2], *rows[3:]])
    assert place.run(entry) == 0 and place.contents() == sound.contents()


def test_rows_of_another_model_are_noticed_though_each_is_whole(place: Place, tmp_path: Path) -> None:
    """Lines are sealed with what they are of: they cannot come from another file."""
    other = Place(tmp_path / "other", place.world)
    assert other.run("generate", "sampling.seed=5") == 0
    shutil.copyfile(other.folder / "answers.jsonl", place.folder / "answers.jsonl")
    assert place.run("generate") == 2


def test_edited_answers_are_taken_as_a_file_of_the_users_own(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(place.folder / "answers.jsonl", ANSWERS["letters: one in an answer"])
    assert place.run("pair") == 2 and "copy the file to a new name" in capsys.readouterr().err
    (place.folder / "answers.jsonl").rename(place.folder / "mine.jsonl")
    words = [f"answers.path={place.folder}/mine.jsonl", "pairs.take=all", f"output={place.folder}/mine/pairs.jsonl"]
    assert place.run("pair", *words) == 0
    rows = rows_of(place.folder / "mine" / "pairs.jsonl")
    assert any(row[side][0]["content"].startswith("x") for row in rows for side in ("chosen", "rejected"))


def test_files_of_an_earlier_version_are_told(
    place: Place, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Rows without digests, and an account without one of them all."""
    for name in ("answers", "pairs.scores"):
        spoil(
            place.folder / f"{name}.jsonl",
            lambda rows: [{k: v for k, v in row.items() if k != "digest"} for row in rows],
        )
        account = place.folder / f"{name}.json"
        facts = json.loads(account.read_text(encoding="utf-8"))
        account.write_text(
            json.dumps({key: value for key, value in facts.items() if key != "digest"}), encoding="utf-8"
        )
    assert place.run("generate") == 2
    assert "answers.jsonl, line 1: " in (told := capsys.readouterr().err) and "an earlier version" in told
    assert place.run("pair") == 2, "scores are not taken"
    assert "pairs.scores.jsonl, line 1: " in (told := capsys.readouterr().err) and "an earlier version" in told
    (place.folder / "pairs.scores.jsonl").unlink()
    with caplog.at_level(logging.INFO):
        assert place.run("pair") == 0, "answers are, and that is said"
    assert "was written by an earlier version without digests" in caplog.text
