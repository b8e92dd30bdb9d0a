"""Every file and command of docs/own_things.md, typed as they stand: composed, checked, and trained for a step."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attnpo.config.compose import load
from attnpo.judge.prompts import JudgeTemplate
from attnpo.schema import EncodedResponse, PreferencePair
from tests.bad_input.attempts import Attempts
from tests.objectives.inputs import Maker
from tests.run.worlds import build_world

PAGE = (Path(__file__).parents[2] / "docs" / "own_things.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^python -m attnpo\.(\w+) --config-dir own (.+)$", PAGE, re.MULTILINE)
SMALL = ["setting=real_smoke", "model.path=unset", "data.path=unset"]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the page, with what the page exports."""
    for name, content in re.findall(r"^```\w+\n# own/(\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        file = tmp_path / "own" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    allowed = re.search(r"^export ATTNPO_ALLOW_TARGETS=(\S+) PYTHONPATH=own$", PAGE, re.MULTILINE)
    assert allowed is not None
    monkeypatch.setenv("ATTNPO_ALLOW_TARGETS", allowed[1])
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "own"
    for module in allowed[1].split(","):
        sys.modules.pop(module, None)


def test_the_commands_compose(own: Path) -> None:
    assert [name for name, _ in COMMANDS] == ["fit", "fit", "fit", "fit", "evaluate"]
    for name, given in COMMANDS:
        root = "passport" if name == "evaluate" else name
        words = [word for word in shlex.split(given) if word != "benchmark=judge"]
        load(root, words, own)


def test_the_source_weighs_the_first_sentence(own: Path) -> None:
    source = load("fit", [*SMALL, "weights=first_sentence", "weights.rest=0.5"], own).weights
    pair = PreferencePair.from_texts([{"role": "user", "content": "q"}], "Red. Or blue", "Two")
    encoded = EncodedResponse([1], [5, 6, 7, 2], [(0, 3), (3, 4), (4, 12), (12, 12)])
    assert source.weigh(pair, "chosen", encoded).tolist() == [1, 1, 0.5, 0.5]


def test_the_objective_is_dpo_at_no_offset(own: Path) -> None:
    words = [*SMALL, "weights=uniform", "objective=offset"]
    offset, none = (load("fit", [*words, f"objective.offset={value}"], own).objective for value in (1, 0))
    twdpo = load("fit", [*SMALL, "weights=uniform", "objective=twdpo", "objective.beta=0.1"]).objective
    case = Maker(twdpo.requires).case()
    lost, plain, expected = (of(case.policy, case.reference, case.batch).losses for of in (offset, none, twdpo))
    torch.testing.assert_close(plain, expected)
    assert bool((lost > plain).all())


def test_the_study_has_its_arms(own: Path) -> None:
    study = load("fit", ["experiment=my_study"], own).study
    assert [*study.arms] == ["uniform", "first sentence", "its shuffled control", "offset"]
    assert study.control == "uniform"


def test_the_wording_is_the_judges(own: Path) -> None:
    judge = load("fit", [*SMALL, "judge=mine"], own).judge
    template = JudgeTemplate.from_file(judge.prompt_rules().template_file)
    assert template.text == (own / "judge" / "mine.txt").read_text() and "Somebody asked" in template.text


def test_source_and_objective_train(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    world = tmp_path / "world"
    world.mkdir()
    attempts = Attempts(build_world(world), tmp_path, capsys, caplog)
    answer = attempts.fit("--config-dir", "own", "weights=first_sentence", "objective=offset")
    assert answer.status == 0, answer.error
