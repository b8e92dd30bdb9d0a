"""The judge's passport through its configuration: a judge that knows, one of random weights, and bad input."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from attnpo.cli.entry import run_entry
from attnpo.data.base import PairSet
from attnpo.judge.base import JudgeReading, LoadedJudge
from attnpo.judge.judge import RunJudge
from attnpo.judge.verdicts import wilson_interval
from attnpo.lab.reports.passport import draw_sample, write_passport
from attnpo.lab.testbed.pairs import write_jsonl
from attnpo.lab.testbed.words import POLARITY
from attnpo.schema import PreferencePair
from attnpo.system.files import read_record
from tests import own_texts
from tests.run.worlds import World, build_world

TRAIN, VAL, BIAS, MASS = 48, 8, 0.7, 0.4
PAIRS = TRAIN + VAL
TRUTH = (
    "truth={_target_:attnpo.lab.testbed.scoring.TruthScorer,"
    "grammar:{_target_:attnpo.lab.testbed.grammar.Grammar,min_clauses:1,max_clauses:2}}"
)


class KnowingJudge:
    """Four nats for the polarity of an answer's words, and a liking for answer A; probability 0.8 on the labels.

    Layer 1 has 0.4 of its attention on the words with a polarity, layer 2 looks at every token alike.
    """

    num_layers = 2

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

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
        assert verdict and label_ids is not None
        return [self._one(list(ids), layers, label_ids) for ids in prompts]

    def _one(self, ids: list[int], layers: Sequence[int], labels: tuple[int, int]) -> JudgeReading:
        words = self.tokenizer.convert_ids_to_tokens(ids)
        cut = len(words) - 1 - words[::-1].index("review")  # the last one opens review B
        polar = torch.tensor([POLARITY.get(word, 0.0) for word in words])
        logits = torch.tensor([4 * float(polar[:cut].sum()) + BIAS, 4 * float(polar[cut:].sum())])
        marked = (polar != 0).float()
        first = MASS * marked / marked.sum().clamp(min=1)
        first[-1] += 1 - first.sum()
        rows = torch.stack([first, torch.full_like(first, 1 / len(ids))])[[layer - 1 for layer in layers]]
        return JudgeReading(rows, None, logits, labels[int(logits.argmax())], torch.tensor([0.5, 0.3, 0.5]).log())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A tiny random model, and pairs whose every fourth label is wrong."""
    made = build_world(tmp_path_factory.mktemp("passport"), 4 * TRAIN, 4 * VAL)
    for name, count in (("train", TRAIN), ("test", VAL)):
        path = made.data / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [row for row in rows if polarity(row, "chosen") > polarity(row)][:count]
        assert len(rows) == count
        for row in rows[::4]:
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
        write_jsonl(path, rows)
    return made


def polarity(row: dict[str, Any], side: str = "rejected") -> float:
    return sum(POLARITY.get(word, 0.0) for word in row[side][-1]["content"].split())


def asked(world: World, output: Path, *more: str) -> int:
    """The exit status of the command on the tiny world."""
    given = ["passport.removal_pairs=12", "passport.shares=[0.2]", *more]
    return command(output, *(word for word in world.overrides() if not word.startswith("callbacks.")), *given)


def command(output: Path, *given: str) -> int:
    """The exit status of the command."""

    def main(cfg: Any) -> int:
        write_passport(cfg)
        return 0

    words = [*given, f"output={output}", "name=told"]
    return run_entry(main, "passport", words, "", "", complete=lambda cfg: cfg.prepare is None)


def told(output: Path) -> dict[str, Any]:
    found = read_record(output / "told" / "passport.json")
    assert found is not None
    return found


def refused(world: World, output: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert asked(world, output, *more) == 2
    return capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ what it says


def test_a_judge_that_knows_is_worth_reading(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(judge: RunJudge, device: torch.device, keep: bool) -> LoadedJudge:
        return LoadedJudge(model=KnowingJudge(world.model), prompts=judge.prompts, verdict=judge.settings.verdict)

    monkeypatch.setattr(RunJudge, "load", load)
    assert asked(world, tmp_path, TRUTH) == 0
    found = told(tmp_path)
    assert found["judgement"]["worth"] == "worth reading"
    averaged = found["accuracy"]["averaged"]
    assert averaged["value"] == 0.75 and averaged["count"] == PAIRS, "the bias cancels, the wrong labels do not"
    assert (averaged["low"], averaged["high"]) == pytest.approx(wilson_interval(0.75, PAIRS))
    assert found["accuracy"]["pull"]["value"] == pytest.approx(BIAS, abs=1e-5)
    assert found["no_label"]["value"] == 0 and found["label_mass"]["value"] == pytest.approx(0.8)
    assert found["truth"]["wrong_labels"]["value"] == 0.25 and found["truth"]["accuracy"]["value"] == 1.0
    seeing, blind = found["layers"]
    assert seeing["mass"]["value"] == pytest.approx(MASS, abs=1e-4)
    assert blind["mass"]["value"] == pytest.approx(found["answer_tokens"], rel=0.05), "every token alike"
    assert seeing["gain"]["low"] > 0 > blind["gain"]["low"]
    assert seeing["truth"] > 0.5 > blind["truth"] == pytest.approx(found["truth"]["equal"], abs=0.05)
    assert blind["effective_share"] > 0.95 > seeing["effective_share"]
    assert "start with weights.layer=1" in found["judgement"]["advice"][0]
    page = (tmp_path / "told" / "passport.html").read_text()
    assert '<p class="banner good">&#10003; Worth reading</p>' in page
    shown = capsys.readouterr().out
    assert "Worth reading" in shown and "above chance: right in 75.0 % of 56 pairs" in shown
    tables = [line for line in shown.splitlines() if line.startswith(" ") and not line.startswith("  ")]
    assert tables and max(map(len, tables)) <= 80


def test_a_model_that_cannot_judge_is_known_in_one_look(
    babbler: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On pairs of texts: half of its verdicts are right, and none of them names a label."""
    for split, start in (("train", 0), ("test", 150)):
        own_texts.write_rows(tmp_path / "data" / f"{split}.jsonl", start + 50 + 100 * (not start), start)
    data = tmp_path / "data"
    given = ("setting=real_smoke", f"model.path={babbler}", f"data.path={data}", f"store={tmp_path / 'store'}")
    assert command(tmp_path, *given, "passport.pairs=60", "passport.removal_pairs=0") == 0
    found = told(tmp_path)
    assert found["judgement"]["worth"] == "at chance"
    averaged = found["accuracy"]["averaged"]
    assert averaged["count"] == 60 and averaged["low"] < 0.5 < averaged["high"]
    # In the plain chat frame its first words are letters more often: 0.104 of the probability, one half is asked.
    assert found["no_label"]["value"] > 0.9 and found["label_mass"]["value"] < 0.2
    assert '<p class="banner bad">&#10007; At chance</p>' in (tmp_path / "told" / "passport.html").read_text()
    assert "At chance" in capsys.readouterr().out


def test_a_random_model_is_at_chance(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(world, tmp_path, "passport.pairs=32", "judge.verdict=false") == 0
    found = told(tmp_path)
    assert found["judgement"]["worth"] == "at chance" and found["truth"] is None
    assert found["statistics"]["pairs"] == found["accuracy"]["averaged"]["count"] == 32
    low, high = (found["accuracy"]["averaged"][end] for end in ("low", "high"))
    assert low < 0.5 < high
    cost = found["cost"]
    assert (cost["pairs"], cost["prompts"], cost["measured"]) == (PAIRS, 2 * PAIRS, 64)
    assert cost["seconds"] > 0 and cost["tokens"] > cost["prompts"] and cost["store"] > 0 and cost["removals"] > 0
    assert 0 < found["label_mass_low"] <= found["label_mass"]["value"] < 1
    assert [look["layer"] for look in found["layers"]] == [1, 2]
    assert all(0 < look["mass"]["value"] < 1 for look in found["layers"])
    assert any(
        "judge more pairs (passport.pairs): 24 have not been judged yet" in line
        for line in found["judgement"]["advice"]
    )
    page = (tmp_path / "told" / "passport.html").read_text()
    assert '<p class="banner bad">&#10007; At chance</p>' in page
    assert not world.store.exists() or not list(world.store.glob("weights/*")), "nothing is put into the store"
    capsys.readouterr()
    # The same command again: the same numbers, times apart. Another command does not overwrite it.
    assert asked(world, tmp_path, "passport.pairs=32", "judge.verdict=false") == 0
    again = told(tmp_path)
    for name in ("cost", "versions"):
        del again[name], found[name]
    assert again == found
    assert "contains the report of another command" in refused(world, tmp_path, capsys, "passport.pairs=31")


def test_layers_and_removals_can_be_left_out(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys that only training reads are named."""
    given = ("passport.layers=[last]", "passport.removal_pairs=0", "weights.heads=[1]", "optimizer.lr=1")
    assert asked(world, tmp_path, *given) == 0
    assert any("optimizer.lr has no effect: the passport trains nothing" in line for line in caplog.messages)
    found = told(tmp_path)
    (look,) = found["layers"]
    assert look["layer"] == 2 and look["gain"] is None and found["full"] is None and found["cost"]["removals"] == 0
    assert any("not measured (passport.removal_pairs=0)" in reason for reason in found["judgement"]["reasons"])


def test_what_was_dropped_before_judging_is_told(world: World, tmp_path: Path) -> None:
    assert (
        asked(world, tmp_path, "lengths.max_length=24", "lengths.max_prompt_length=20", "passport.removal_pairs=0") == 0
    )
    found = told(tmp_path)
    (reason,) = found["data"]
    assert "lengths.max_length 24" in reason
    assert found["rows"] == PAIRS == found["cost"]["pairs"] + found["data"][reason]


def test_the_draw_depends_on_its_seed_and_not_on_the_order() -> None:
    pairs = [PreferencePair.from_texts([{"role": "user", "content": str(n)}], "good", "bad") for n in range(30)]
    mixed = random.Random(1).sample(pairs, 30)
    assert draw_sample(pairs, 10, 0) == draw_sample([*mixed, pairs[0]], 10, 0)
    assert draw_sample(pairs, 10, 0) != draw_sample(pairs, 10, 1)
    assert len(draw_sample([*pairs, *pairs], 99, 0)) == 30
    assert draw_sample(pairs, 10, 0) == draw_sample(pairs, 20, 0)[:10], "a larger sample holds the smaller one"


# ------------------------------------------------------------------------------------------------ bad input


def test_no_pairs(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of which none is a pair are refused where they are read; a reader of one's own may give none."""
    rows = [{"prompt": "p", "chosen": "same", "rejected": "same"}]
    for name in ("train", "test"):
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    said = refused(world, tmp_path, capsys, f"data.path={tmp_path}")
    assert "has no usable pairs: 1 rows read" in said and "data.columns" in said
    none = {"train": PairSet([]), "val": PairSet([])}
    monkeypatch.setattr("attnpo.lab.reports.passport.read_pairs", lambda *_: none)
    assert "expected labelled pairs, but found none in 0 rows" in refused(world, tmp_path, capsys)


def test_weights_without_a_judge(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(world, tmp_path, capsys, "weights=uniform", "objective=dpo")
    assert "weights=uniform uses no judge" in said and "weights=attention" in said
    assert not (tmp_path / "told").exists(), "told before anything is made"


def test_a_label_that_is_no_token(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(world, tmp_path, capsys, "judge.labels=[A,neither]")
    assert "judge.labels: 'neither' is not in the vocabulary of the judge, which reads it as '<unk>'" in said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("passport.pairs=0", "passport.pairs must be at least 1"),
        ("passport.shares=[1.0]", "passport.shares: expected shares between 0 and 1"),
        ("passport.layers=[3]", "passport.layers: expected a whole number from 1 to 2"),
        ("passport.seed=-1", "passport.seed: expected a whole number"),
    ],
)
def test_numbers_out_of_range(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    assert said in refused(world, tmp_path, capsys, override)


def test_the_page_of_a_few_pairs_does_not_judge(world: World, tmp_path: Path) -> None:
    assert asked(world, tmp_path, "passport.pairs=1", "passport.removal_pairs=1") == 0
    found = told(tmp_path)
    assert found["judgement"]["worth"] == "doubtful" and found["accuracy"]["pull"]["low"] is None
    assert "provide at least 20 labelled pairs" in found["judgement"]["advice"]
