"""Whether the verdict position is the verdict's, through the commands: said, warned of, stopped, and kept."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from attnpo import fit, show, weigh
from attnpo.cli.entry import run_entry
from attnpo.judge.base import JudgeReading, LoadedJudge
from attnpo.judge.judge import PAIRS, RunJudge
from tests.run.worlds import TRAIN, VAL, World, build_world

PROMPTS = 2 * min(PAIRS, TRAIN + VAL)
SAID, LOW = "of the probability at the verdict position is on its two labels", "less than the 50 %"


@dataclass
class ScriptedJudge:
    """Puts ``mass`` on its two labels, evenly, and the rest on the token ``other``; looks at every token alike.

    ``asked``: prompts and layers of each call, and whether it was for a verdict; ``last``: each prompt's last token.
    """

    mass: float
    other: int
    asked: list[tuple[int, tuple[int, ...], bool]]
    last: list[int] = field(default_factory=list)
    num_layers: int = 2

    def read(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        layers: Sequence[int],
        per_head: bool = False,
        rollout: bool = False,
        verdict: bool = True,
        label_ids: tuple[int, int] | None = None,
    ) -> list[JudgeReading]:
        self.asked.append((len(prompts), tuple(layers), verdict))
        self.last += [ids[-1] for ids in prompts]
        found = []
        for ids in prompts:
            rows = torch.full((len(layers), len(ids)), 1 / len(ids))
            if not verdict:
                found.append(JudgeReading(rows))
                continue
            assert label_ids is not None
            half, rest = math.log(self.mass / 2), math.log(1 - self.mass)
            top = label_ids[0] if half > rest else self.other
            found.append(
                JudgeReading(rows, None, torch.tensor([half, half]), top, torch.tensor([half, half, max(half, rest)]))
            )
        return found


@pytest.fixture
def world(fresh: World) -> World:
    """The tiny world with an empty store."""
    return fresh


def scripted(monkeypatch: pytest.MonkeyPatch, mass: float) -> ScriptedJudge:
    """The judge that takes the place of the tiny world's."""
    judge = ScriptedJudge(mass, 7, [])

    def load(room: RunJudge, device: torch.device) -> LoadedJudge:
        return LoadedJudge(model=judge, prompts=room.prompts, verdict=room.settings.verdict)

    monkeypatch.setattr(RunJudge, "load", load)
    return judge


def weighs(world: World, *more: str) -> int:
    words = [word for word in world.overrides(*more) if not word.startswith(("callbacks.", "batch."))]
    return run_entry(weigh.main, "weigh", words, "", "", complete=lambda cfg: cfg.prepare is None)


def test_a_judge_that_answers_is_said_once_and_kept(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    judge = scripted(monkeypatch, 0.75)
    assert weighs(world, "judge.low_label_mass=stop") == 0
    (said,) = [line for line in caplog.messages if SAID in line]
    assert said.startswith("judge: 75 % of the probability") and f"({PROMPTS} of {PROMPTS})" in said
    assert LOW not in caplog.text
    assert judge.asked == [(PROMPTS, (), True), (2 * (TRAIN + VAL), (1, 2), True)]
    # What the store has is not measured again, whole or in part.
    caplog.clear()
    assert weighs(world, "judge.min_label_mass=0.8") == 0
    assert len(judge.asked) == 2 and SAID in caplog.text and "less than the 80 %" in caplog.text
    (shard,) = [path for path in world.store.glob("weights/*/*.parquet")]
    shard.unlink()
    assert weighs(world) == 0
    assert judge.asked[2:] == [(2 * (TRAIN + VAL), (1, 2), True)]


@pytest.mark.parametrize("verdict", ["true", "false"])
def test_a_judge_that_would_write_something_else_is_warned_of(
    verdict: str, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    judge = scripted(monkeypatch, 0.25)
    assert weighs(world, f"judge.verdict={verdict}") == 0
    (warned,) = [record for record in caplog.records if LOW in record.getMessage()]
    assert warned.levelname == "WARNING" and "25 % of its probability" in warned.getMessage()
    assert judge.asked[1:] == [(2 * (TRAIN + VAL), (1, 2), verdict == "true")], "only the first prompts are read whole"


def test_stop_ends_it_before_the_pass(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = scripted(monkeypatch, 0.25)
    for _ in range(2):
        assert weighs(world, "judge.low_label_mass=stop") == 2
        told = capsys.readouterr().err
        assert LOW in told and "set judge.low_label_mass=warn" in told and told.count("\n") == 1
    assert judge.asked == [(PROMPTS, (), True)], "the second time from the store, and never the pass"
    assert not list(world.store.glob("weights/*/*.parquet"))


def forget(record: Path) -> None:
    record.unlink()


def damage(record: Path) -> None:
    record.write_text(record.read_text().replace("0.", "0.9", 1))


@pytest.mark.parametrize("harm", [forget, damage])
def test_stop_measures_again_where_the_record_is_lost(
    harm: Callable[[Path], None],
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    judge = scripted(monkeypatch, 0.25)
    assert weighs(world) == 0
    (record,) = world.store.glob("label_mass/*.json")
    harm(record)
    judge.asked.clear()
    capsys.readouterr()
    assert weighs(world, "judge.low_label_mass=stop") == 2
    assert LOW in capsys.readouterr().err
    assert judge.asked == [(PROMPTS, (), True)], "the labels alone are read again, not the weights"
    assert weighs(world, "judge.low_label_mass=stop") == 2
    assert len(judge.asked) == 1, "the record is mended"
    harm(record)
    caplog.clear()
    assert weighs(world) == 0
    assert len(judge.asked) == 1, "a warning is not worth loading the judge"
    assert "no valid measurement of the judge's labels" in caplog.text, "and it is said that there is none"


def test_showing_a_stored_pair_loads_no_judge_to_measure(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    judge = scripted(monkeypatch, 0.25)
    assert weighs(world) == 0
    judge.asked.clear()
    words = [word for word in world.overrides() if not word.startswith(("callbacks.", "batch."))]
    assert show.run_show([*words, "rows=1", "judge.low_label_mass=stop"]) == 0
    assert judge.asked == [] and "no valid measurement of the judge's labels" in caplog.text


def test_many_processes_refuse_weights_without_their_measurement(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = scripted(monkeypatch, 0.75)
    assert weighs(world) == 0
    (record,) = world.store.glob("label_mass/*.json")
    record.unlink()
    monkeypatch.setattr("attnpo.data.weighing.world_size", lambda: 2)
    words = world.overrides("experiment=none", f"output={tmp_path}", "name=run", "trainer.max_steps=1")
    words += ["callbacks.checkpoints=false", "callbacks.samples=0", "judge.low_label_mass=stop"]
    capsys.readouterr()
    judge.asked.clear()
    assert run_entry(fit.main, "fit", words, "", "") == 2
    told = capsys.readouterr().err
    assert "the judge's measured label mass is missing" in told and "python -m attnpo.weigh" in told
    assert judge.asked == []


def test_two_sets_share_a_measurement_only_where_the_measured_pairs_are_the_same(
    template: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Leaves out the first pair, which cannot be shown: 15 of the first 16 are measured and the next one."""
    wide = build_world(tmp_path / "wide", train=40, val=2)
    rows = [json.loads(line) for line in (wide.data / "train.jsonl").read_text().splitlines()]
    topic = rows[0]["topic"]
    first, *others = [rows[0], *(row for row in rows if row["topic"] != topic and topic not in row["prompt"])]
    own = AutoTokenizer.from_pretrained(template.model).chat_template
    jinja = tmp_path / "judge.jinja"
    jinja.write_text(own.replace("message['content']", f"message['content'] | replace('{topic}', '')"))
    asked = (f"judge.path={template.model}", f"judge.chat_template={jinja}", "judge.low_label_mass=stop")
    found = []
    for name, last, mass in (("one", others[15], 0.75), ("two", others[16], 0.25)):
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            lines = [first, *others[:15], last] if split == "train" else [others[-1]]
            (tmp_path / name / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
        judge = scripted(monkeypatch, mass)
        status = weighs(World(template.model, tmp_path / name, tmp_path / "store"), *asked)
        found.append((status, judge.asked[0]))
    measured = (2 * PAIRS, (), True)
    assert found == [(0, measured), (2, measured)], "the second set is measured itself, and stopped by what it gave"
    assert LOW in capsys.readouterr().err


@pytest.mark.parametrize("assembly", ["text", "ids"])
def test_the_verdict_is_read_after_the_prefill(assembly: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = scripted(monkeypatch, 0.75)
    given = ("judge.prefill=the better review is", "judge.labels=[' A',' B']", f"judge.assembly={assembly}")
    assert weighs(world, *given) == 0
    decode = AutoTokenizer.from_pretrained(world.model).decode
    assert len(judge.last) == PROMPTS + 2 * (TRAIN + VAL)
    assert {decode([token]).strip() for token in judge.last} == {"is"}
    judge.last.clear()
    assert weighs(world, f"judge.assembly={assembly}") == 0, "other prompts, so that nothing of it is in the store"
    assert {decode([token]).strip() for token in judge.last} == {"<assistant>"}


def test_a_real_judge_through_fit(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = world.overrides("experiment=none", f"output={tmp_path}", "name=run", "trainer.max_steps=1")
    words += ["callbacks.checkpoints=false", "callbacks.samples=0"]
    assert run_entry(fit.main, "fit", [*words, "judge.low_label_mass=stop"], "", "") == 2
    assert not list(world.store.glob("weights/*/*.parquet"))
    assert run_entry(fit.main, "fit", words, "", "") == 0
    kept = json.loads((tmp_path / "run" / "result.json").read_text())["inputs"]["label_mass"]
    assert 0 < kept["share"] < 0.5 and kept["prompts"] == PROMPTS
    assert sum(count for _, count in kept["written"]) <= PROMPTS
    assert any(LOW in record.getMessage() and record.levelname == "WARNING" for record in caplog.records)


def test_settings_that_cannot_be(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    for given, told in (("min_label_mass=50", "in [0, 1], got 50"), ("low_label_mass=halt", "warn, stop")):
        assert weighs(world, f"judge.{given}") == 2
        assert told in capsys.readouterr().err
