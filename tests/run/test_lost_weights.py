"""Weights that are lost on the way to the training tokens are measured by layer and side, shown and warned of."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from attnpo.cli.entry import run_entry
from attnpo.judge.base import JudgeReading, LoadedJudge
from attnpo.judge.judge import RunJudge
from attnpo.lab.reports.passport import write_passport
from attnpo.lab.reports.passport_config import PassportConfig
from attnpo.run.input_summary import example_statistics, log_inputs
from attnpo.run.run import run
from attnpo.run.run_config import RunConfig
from attnpo.run.weight_export import write_weights
from attnpo.schema import SIDES
from attnpo.system.files import read_record
from attnpo.weigh import fill_store
from tests.run.made import make_inputs
from tests.run.worlds import World

PLAIN = "weights.postprocess.sink_tokens=0"
HEAVY = {"chosen": 4.0, "rejected": 29.0}


class LastWordJudge:
    """Layer 1 looks at every token alike; layer 2 at the end of each answer more than at its other tokens.

    The end is a full stop with a line break behind it, a token without a partner in training. By side it counts for as
    many others as ``HEAVY`` says; prompts come in pairs, the first with the chosen answer first.
    """

    num_layers = 2

    def __init__(self, folder: Path) -> None:
        self.end = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(".\n")

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
        found = []
        for place, ids in enumerate(prompts):
            row = torch.ones(len(ids))
            ends = [at for at, token in enumerate(ids) if token == self.end][-2:]  # the question may have one
            for at, side in zip(ends, SIDES[::-1] if place % 2 else SIDES, strict=False):
                row[at] = HEAVY[side]
            rows = torch.stack([torch.ones(len(ids)), row])[[layer - 1 for layer in layers]] / 100
            token = None if label_ids is None else label_ids[0]
            found.append(JudgeReading(rows, None, torch.zeros(2), token, torch.tensor([0.5, 0.4, 0.5]).log()))
        return found


@pytest.fixture(autouse=True)
def judge(world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def load(judge: RunJudge, device: torch.device, keep: bool = True) -> LoadedJudge:
        return LoadedJudge(model=LastWordJudge(world.model), prompts=judge.prompts, verdict=judge.settings.verdict)

    monkeypatch.setattr(RunJudge, "load", load)
    caplog.set_level(logging.INFO, logger="attnpo")


def compute_expected(world: World, layer: int, *splits: str) -> dict[str, float]:
    """Computes by side the mean of what all but the last token of each response has, from the data alone."""
    files = [world.data / f"{split}.jsonl" for split in splits or ("train",)]
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    kept = {}
    for side in SIDES:
        others = [len(row[side][-1]["content"].split()) - 1 for row in rows]
        last = HEAVY[side] if layer == 2 else 1.0
        kept[side] = sum(count / (count + last) for count in others) / len(others)
    return kept


def words(kept: dict[str, float]) -> str:
    return f"kept mass {kept['chosen']:.3f} (chosen) and {kept['rejected']:.3f} (rejected)"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelname == "WARNING" and "lost" in one.getMessage()]


def test_a_run_says_what_it_loses(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the log, the result, the page and the exported card, by side; with the layer, and what helps."""
    kept = compute_expected(world, 2)
    run(world.config(PLAIN, "trainer.max_steps=1", "callbacks.samples=0"), tmp_path / "run")
    line = next(one.getMessage() for one in caplog.records if one.getMessage().startswith("train: coverage 0."))
    assert "source coverage 0." in line and words(kept) in line
    warned = next(one for one in warnings(caplog) if one.startswith("train: "))
    assert "layer 2" in warned and words(kept) in warned
    assert all(option in warned for option in ("judge.assembly=ids", "judge.template_file", "align.method=characters"))
    train = json.loads((tmp_path / "run" / "result.json").read_text())["inputs"]["train"]
    assert [train[f"kept_mass_{side}"] for side in SIDES] == pytest.approx(list(kept.values()), abs=1e-5)
    assert train["source_coverage"] == pytest.approx(train["coverage"]), "one token of each response on both sides"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "WARNING: train: weights of Attention, layer 2" in page and "kept mass chosen" in page
    cards = list((tmp_path / "run").rglob("README.md"))
    assert cards and all("kept_mass_rejected" in card.read_text() for card in cards)


def tell(cfg: RunConfig) -> None:
    """Logs what became of the inputs of a configuration."""
    inputs = make_inputs(cfg)
    log_inputs(inputs, example_statistics(inputs))


@pytest.mark.parametrize("more", ["judge.assembly=ids", "align.method=characters"])
def test_what_is_said_to_help_helps(world: World, more: str, caplog: pytest.LogCaptureFixture) -> None:
    tell(world.config(PLAIN, more))
    assert words({"chosen": 1.0, "rejected": 1.0}) in caplog.text
    assert not warnings(caplog)


def test_weights_of_the_training_tokens_lose_nothing_to_warn_of(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Half of every response is cut off: that is counted by itself."""
    cut = ("lengths.max_length=20", "lengths.max_prompt_length=11", "lengths.overlong=cut")
    tell(world.config("weights=uniform", *cut))
    assert words({"chosen": 1.0, "rejected": 1.0}) in caplog.text and not warnings(caplog)
    tell(world.config(PLAIN, "weights.layer=1", *cut))
    assert "that lengths.max_length cut from responses" in warnings(caplog)[0]


def test_every_stored_layer_is_measured(world: World, caplog: pytest.LogCaptureFixture) -> None:
    fill_store(world.config(PLAIN))
    for layer in (1, 2):
        said = [line for line in caplog.text.splitlines() if f"weights of Attention, layer {layer}: coverage" in line]
        assert said and all(words(compute_expected(world, layer)) in line for line in said)
    (warned,) = [one for one in warnings(caplog) if "layer 2" in one]
    assert words(compute_expected(world, 2)) in warned


def test_the_passport_measures_every_layer(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def main(cfg: PassportConfig) -> int:
        write_passport(cfg)
        return 0

    own = [one for one in world.overrides(PLAIN) if not one.startswith("callbacks.")]
    more = ["passport.removal_pairs=0", f"output={tmp_path}", "name=told"]
    assert run_entry(main, "passport", [*own, *more], "", "", complete=lambda cfg: cfg.prepare is None) == 0
    found: dict[str, Any] = read_record(tmp_path / "told" / "passport.json") or {}
    for look in found["layers"]:
        kept = compute_expected(world, look["layer"], "train", "test")
        assert [look[f"kept_mass_{side}"] for side in SIDES] == pytest.approx(list(kept.values()), abs=1e-5)
    shown = " ".join(capsys.readouterr().out.split())
    assert words(compute_expected(world, 2, "train", "test")) in shown and "align.method=characters" in shown
    assert "kept chosen" in (tmp_path / "told" / "passport.html").read_text()


def test_exported_weights_say_what_each_pair_kept(world: World, tmp_path: Path) -> None:
    write_weights(world.config(PLAIN), tmp_path / "weights.parquet")
    table = pq.read_table(tmp_path / "weights.parquet")
    for side in SIDES:
        sums = [sum(row) for row in table.column(f"{side}_weights").to_pylist()]
        assert table.column(f"{side}_kept_mass").to_pylist() == pytest.approx(sums, abs=1e-6)
        assert table.column(f"{side}_source_coverage").to_pylist() == table.column(f"{side}_coverage").to_pylist()
