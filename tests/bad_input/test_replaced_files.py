"""Files that a command is told to write: what lies there is kept, unless the same command wrote it and nobody since."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import attnpo
from attnpo import generate, pair, show, weigh
from attnpo.cli.entry import run_entry
from attnpo.schema import UserError
from tests.bad_input.attempts import Attempts
from tests.bad_input.conftest import Record
from tests.conformance import __main__ as verify

TYPED = ("prompt=review the film .", "chosen=the film was great .", "rejected=the film was awful .")
WEIGHTS = ("experiment=none", "weights=decay")


class Given:
    """Commands on the world of ``attempts``, and the line that they were refused with."""

    def __init__(self, attempts: Attempts, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.attempts, self.folder, self.capsys = attempts, folder, capsys
        model = f"model.path={attempts.world.model}"
        self.prompts, self.answers = folder / "prompts.jsonl", folder / "answers.jsonl"
        write(self.prompts, [{"prompt": f"p {n}"} for n in range(2)])
        write(self.answers, [{"prompt": "p", "answer": text, "points": at} for at, text in enumerate("abc")])
        self.of_weigh = attempts.world.overrides(*WEIGHTS)
        self.of_show = [*(word for word in self.of_weigh if "data.path" not in word), *TYPED]
        self.of_generate = [model, f"data.path={self.prompts}", "sampling.max_new_tokens=2", "trainer.accelerator=cpu"]
        self.of_pair = [f"answers.path={self.answers}", "ranker=column", "ranker.column=points"]

    def run(self, command: str, *words: str) -> int:
        """Returns the exit status of a command by its name, with these words after its own."""
        self.capsys.readouterr()
        mains: dict[str, Callable[..., int]] = {"weigh": weigh.main, "generate": generate.main, "pair": pair.main}
        if command == "show":
            return show.run_show([*self.of_show, *words])
        if command == "verify":
            return verify.main(["families", "only=gpt2", *words])
        return run_entry(mains[command], command, [*getattr(self, f"of_{command}"), *words], "", "")

    def refused(self, command: str, *words: str) -> str:
        """Returns the one line of a command that ends with status 2."""
        status = self.run(command, *words)
        error = self.capsys.readouterr().err
        assert status == 2, f"exit status {status}"
        assert error.startswith("error: ") and error.count("\n") == 1, error
        return error


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def given(attempts: Attempts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Given:
    return Given(attempts, tmp_path / "inputs", capsys)


# The command, the word that names its file, and what else it would write in that file's folder.
PLACES = [
    *(
        ("weigh", f"export=OUT/mine.{end}", f"mine.{end}{mark}")
        for end in ("jsonl", "parquet")
        for mark in ("", ".meta.json")
    ),
    *(("show", f"out=OUT/mine.{end}", f"mine.{end}") for end in ("jsonl", "csv", "parquet", "html")),
    ("show", "out=OUT/mine.csv", "mine.csv.meta.json"),
    *(("generate", "output=OUT/mine.jsonl", f"mine.{end}") for end in ("jsonl", "json")),
    *(("pair", "output=OUT/mine.jsonl", f"mine.{end}") for end in ("jsonl", "json", "scores.jsonl", "scores.json")),
    ("verify", "table=OUT/mine.md", "mine.md"),
    ("verify", "keep=OUT", "mine.md"),
    ("verify", "keep=OUT", "pairs/train.jsonl"),
]


@pytest.mark.parametrize(("command", "word", "name"), PLACES, ids=[f"{one[0]} {one[1]} {one[2]}" for one in PLACES])
def test_a_file_that_the_command_did_not_write_stays(
    command: str, word: str, name: str, given: Given, tmp_path: Path, record: Record
) -> None:
    out = tmp_path / "out"
    write(out / name, [{"prompt": "mine", "chosen": "a", "rejected": "b"}])
    before = contents(out)
    told = given.refused(command, word.replace("OUT", str(out)))
    assert contents(out) == before and str(out) in told
    record(f"{command} {word.partition('=')[0]}=: {name} is another file", told, "nothing")


@pytest.mark.parametrize(
    ("command", "word", "other"),
    [
        ("weigh", "export=OUT/a.jsonl", "weights=uniform"),
        ("weigh", "export=OUT/a.parquet", "weights=uniform"),
        ("show", "out=OUT/a.csv", "weights=uniform"),
        ("show", "out=OUT/a.html", "weights=uniform"),
        ("pair", "output=OUT/a.jsonl", "pairs.take=all"),
    ],
)
def test_its_own_file_is_written_anew_until_it_is_edited(
    command: str, word: str, other: str, given: Given, tmp_path: Path
) -> None:
    word = word.replace("OUT", str(tmp_path / "out"))
    path = Path(word.partition("=")[2])
    assert given.run(command, word) == given.run(command, word) == 0
    first = path.read_bytes()
    assert given.run(command, word, other) == 0
    assert path.read_bytes() != first
    path.write_bytes(path.read_bytes() + b"\n")
    assert "has changed since" in given.refused(command, word)


def test_one_command_does_not_replace_what_another_wrote(given: Given, tmp_path: Path) -> None:
    path = tmp_path / "out" / "a.jsonl"
    assert given.run("weigh", f"export={path}") == 0
    assert "was not written by attnpo.show" in given.refused("show", f"out={path}")
    with pytest.raises(UserError, match=r"prompts\.jsonl was not written by attnpo\.weigh"):
        attnpo.export_weights(given.prompts, given.of_weigh)


def test_an_input_is_not_replaced_though_the_command_wrote_it(given: Given, tmp_path: Path) -> None:
    """An export holds pairs: it may be the next command's data, by its name, by a link or as a split of its folder."""
    folder = tmp_path / "out"
    made = folder / "train.jsonl"
    assert given.run("weigh", f"export={made}") == 0
    shutil.copy(given.attempts.world.data / "test.jsonl", folder)
    before = contents(folder)
    (tmp_path / "symbolic.jsonl").symlink_to(made)
    os.link(made, tmp_path / "hard.jsonl")
    for link in ("symbolic", "hard"):
        shutil.copy(f"{made}.meta.json", tmp_path / f"{link}.jsonl.meta.json")
    one_file = (f"data.path={made}", "data.val_share=0.3")
    for data, target in [
        (one_file, made),
        (one_file, tmp_path / "symbolic.jsonl"),
        (one_file, tmp_path / "hard.jsonl"),
        ((f"data.path={folder}",), made),
        ((f"data.path={folder}/../out",), folder / "test.parquet"),
    ]:
        assert "is an input of this command (data.path=" in given.refused("weigh", *data, f"export={target}"), target
    assert contents(folder) == before
    assert given.run("weigh", f"data.path={folder}", f"export={folder}/weights.jsonl") == 0, "of no split"


def test_answers_and_pairs_are_not_written_over_what_they_are_made_of(given: Given) -> None:
    before = given.prompts.read_bytes()
    assert "is an input of this command (data.path=" in given.refused("generate", f"output={given.prompts}")
    rows = [json.loads(line) for line in before.decode().splitlines()]
    table = given.prompts.with_suffix(".json")
    table.write_text(json.dumps(rows), encoding="utf-8")
    given.prompts.unlink()
    kept = table.read_bytes()
    assert str(table) in given.refused("generate", f"data.path={table}", f"output={given.prompts}")
    table.rename(given.answers.with_suffix(".json"))
    given.answers.unlink()
    words = (f"answers.path={given.answers.with_suffix('.json')}", f"output={given.answers}", "answers.answer=prompt")
    assert str(given.answers.with_suffix(".json")) in given.refused("pair", *words)
    assert given.answers.with_suffix(".json").read_bytes() == kept
