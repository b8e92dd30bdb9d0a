"""The commands of docs/data.md on a mixture and on a round of own answers, as a user types them, on a tiny model."""

import json
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from attnpo.cli.entry import run_entry
from attnpo.config.compose import CONFIG_DIR
from tests.docs.commands import of_markdown
from tests.run.worlds import GRAMMAR, World

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = list(of_markdown((ROOT / "docs" / "data.md").read_text(encoding="utf-8")))
SETS = ("chat", "code", "mail")
# One optimiser step or two, for a model that stands for the reader's.
FEW = ["trainer.max_epochs=1", "batch.pairs=4", "batch.micro=2", "trainer.accelerator=cpu", "trainer.threads=1",
       "trainer.progress=false", "callbacks.samples=0", "callbacks.report=false"]  # fmt: skip


@pytest.fixture(scope="module")
def model(babbler: Path) -> tuple[str, list[str], list[str], list[str]]:
    """A model's folder, with what it takes in fit, generate and pair."""
    chat = "chat_template=model/plain_chat.jinja"
    return str(babbler), [], [f"model.{chat}"], [f"ranker.grader.{chat}", wording("short")]


def wording(name: str) -> str:
    return f"ranker.pairwise.template_file={CONFIG_DIR / 'judge' / name}.txt"


def typed(command: str, model: str, more: list[str]) -> int:
    """Runs a command of the page with the reader's model for its capitals; returns the exit status."""
    words = shlex.split(re.sub(r"\b(MODEL|JUDGE)\b", model, command))
    assert words[:2] == ["python", "-m"]
    name = words[2].removeprefix("attnpo.")
    return run_entry(import_module(words[2]).main, name, [*words[3:], *more], "", "", complete=lambda cfg: True)


def the(pattern: str) -> str:
    (found,) = (command for command in COMMANDS if re.search(pattern, command))
    return found


def test_a_mixture_runs_by_the_command_of_the_page(
    world: World, model: tuple[str, list[str], list[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets").mkdir()
    rows = (world.data / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for place, name in enumerate(SETS):
        (tmp_path / "sets" / f"{name}.jsonl").write_text("".join(rows[4 * place : 4 * place + 4]), encoding="utf-8")
    path, of_fit, _, _ = model
    assert typed(the(r"data\.mix="), path, [*of_fit, *FEW, f"store={tmp_path / 'store'}", "name=mix"]) == 0
    result = json.loads((tmp_path / "outputs" / "mix" / "result.json").read_text(encoding="utf-8"))
    found = next(value for value in _below(result) if isinstance(value, dict) and set(value) == set(SETS))
    # One of twelve prompts is for validation: of 4 : 4 : 3 or 3 : 4 : 4 pairs the first gives all at weights 2 : 1 : 1.
    assert {name: one["taken"] for name, one in found.items()} == {"chat": found["chat"]["kept"], "code": 2, "mail": 2}
    assert {one["path"] for one in found.values()} == {f"sets/{name}.jsonl" for name in SETS}


def _below(value: object) -> list[object]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(one for item in inner for one in _below(item))]


def test_a_round_runs_by_the_commands_of_the_page(
    model: tuple[str, list[str], list[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = [{"prompt": prompt.text} for prompt in GRAMMAR.prompts("train")[:6]]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
    path, of_fit, of_generate, of_pair = model
    cpu = "trainer.accelerator=cpu"
    few = ["sampling.max_new_tokens=8", cpu, *of_generate]
    assert typed(the(r"attnpo\.generate .*round1/"), path, few) == 0
    assert typed(the(r"attnpo\.pair .*round1/"), path, [cpu, *of_pair]) == 0
    pairs = [json.loads(line) for line in Path("round1/pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    assert pairs and all(pair["chosen_score"] > pair["rejected_score"] for pair in pairs)
    assert {pair["ranker"] for pair in pairs} == {f"judge {path}"}
    told = json.loads(Path("round1/pairs.json").read_text(encoding="utf-8"))
    assert told["pairs"] == len(pairs) and told["answers"]["made_by"]["sampling"]["max_new_tokens"] == 8
    assert typed(the(r"attnpo\.fit .*round1/"), path, [*of_fit, *FEW, "store=store"]) == 0
    assert (tmp_path / "outputs" / "round1" / "best" / "model.safetensors").is_file()
