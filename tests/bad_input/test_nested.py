"""Files that hold more than can be read: files nested too deeply or multiplied by aliases, templates without end."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from attnpo.config.compose import compose
from attnpo.display.output import read_tables
from attnpo.evaluation.jsonl_store import ReplyStore, read_sidecar
from attnpo.run.folders import load_saved_config
from attnpo.run.result import RunResult
from attnpo.schema import UserError
from attnpo.system.files import read_checksums, read_record
from attnpo.text.template import functions_to_json
from tests.bad_input.attempts import Attempts
from tests.bad_input.conftest import Record

NOT_STARTED = "run not started"
DEEP = "[" * 5000 + "]" * 5000
BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcde", "bcdef", strict=True)
)
FOLDERS = {"broken": "a: [1,", "deep": f"a: {DEEP}", "within itself": "a: &a [*a]", "a bomb": BOMB}


def read_replies(file: Path) -> object:
    file.rename(file.with_name("grades.jsonl"))
    return ReplyStore(file.parent)


READERS: dict[str, Callable[[Path], object]] = {
    "an account of answers": read_sidecar,
    "grades": read_replies,
    "a study's tables": read_tables,
}


@pytest.mark.parametrize("case", READERS)
def test_a_file_nested_too_deeply_is_refused_by_its_name(case: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(f"{DEEP}\n")
    with pytest.raises(UserError, match=r"file.json|grades.jsonl, line 1"):
        READERS[case](tmp_path / "file.json")


def test_a_record_nested_too_deeply_counts_as_damaged(tmp_path: Path) -> None:
    for name in ("record.json", "digests.json"):
        (tmp_path / name).write_text(DEEP)
    assert read_record(tmp_path / "record.json") is None and read_checksums(tmp_path) == {}
    with pytest.raises(ValueError, match="nested too deeply"):
        RunResult.read(DEEP)
    with pytest.raises(ValueError, match="nested too deeply"):
        functions_to_json(DEEP)
    with pytest.raises(ValueError, match="nested too deeply"):
        functions_to_json(json.loads("[" * 700 + "]" * 700))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
def test_a_model_folder_with_a_file_nested_too_deeply(attempts: Attempts, record: Record, name: str) -> None:
    world = attempts.broken_model(lambda folder: (folder / name).write_text(DEEP))
    message = attempts.weigh(world=world).refused()
    assert str(world.model) in message
    record(f"{name} nested 5,000 deep", message, NOT_STARTED)


@pytest.mark.parametrize("case", FOLDERS)
def test_a_configuration_that_cannot_be_held(case: str, tmp_path: Path) -> None:
    """Reads both the user's own and that of a run."""
    file = tmp_path / "weights" / "own.yaml"
    file.parent.mkdir()
    file.write_text(FOLDERS[case])
    said = "expand to more than 100000 values" if "&" in FOLDERS[case] else "cannot be read as a YAML config"
    with pytest.raises(UserError, match=f"own.yaml.* {said}"):
        compose("fit", ["weights=own"], tmp_path)
    file.rename(file.with_name("config.yaml"))
    with pytest.raises(UserError, match=f"config.yaml .*{said}"):
        load_saved_config(file.parent, "run=RUN")


def test_aliases_within_bounds_are_read(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "own.yaml").write_text("layers: &some [1, 2]\nagain: *some\n")
    assert compose("fit", ["weights=own"], tmp_path).weights.again == [1, 2]


BUILT = {
    "10^10 letters": '{{ "x" * 10000000000 }}',
    "10^10 letters of a turn": "{% for i in range(100000) %}{{ messages[0].content ~ 'x' * 100000 }}{% endfor %}",
    "10^8 letters": '{{ "x" * 100000000 }}',
}


@pytest.mark.parametrize("case", BUILT)
def test_a_chat_template_that_writes_without_end_is_stopped(attempts: Attempts, record: Record, case: str) -> None:
    def damage(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(BUILT[case])

    world = attempts.broken_model(damage)
    message = attempts.fit("weights=uniform", world=world).refused()
    assert "ran out of memory on one conversation and was stopped; set model.chat_template to a different" in message
    record(f"a chat template of {case}", message, NOT_STARTED)
