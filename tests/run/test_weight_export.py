"""Weights exported for other trainers: what the file holds, and TRL's trainer on it beside ours."""

import json
import re
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import attnpo
from attnpo.cli.entry import run_entry
from attnpo.config.compose import load
from attnpo.data.prepare import ExampleSet
from attnpo.models.loading import load_tokenizer
from attnpo.run.run import run
from attnpo.schema import UserError
from attnpo.training.metrics_file import read_metrics
from attnpo.weigh import main
from tests.run.made import make_inputs
from tests.run.worlds import TRAIN, World, build_world

ROOT = Path(__file__).resolve().parents[2]
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
PAGE = (ROOT / "docs" / "python_api.md").read_text(encoding="utf-8")
WEIGHTS = ("weights=attention", "weights.layer=1", "experiment=none")


@pytest.fixture(scope="module")
def examples(world: World) -> ExampleSet:
    return make_inputs(world.config(*WEIGHTS)).examples["train"]


def test_parquet_holds_what_training_reads(world: World, examples: ExampleSet, tmp_path: Path) -> None:
    path = tmp_path / "new" / "weights.parquet"
    argv = world.overrides(*WEIGHTS, f"export={path}")
    assert run_entry(main, "weigh", argv, "description", "example") == 0
    rows = pq.read_table(path).to_pylist()
    assert len(rows) == len(examples.examples) == TRAIN
    tokenizer = load_tokenizer(str(world.model))
    texts = [json.loads(line) for line in (world.data / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    for row, example, text in zip(rows, examples.examples, texts, strict=True):
        assert (row["pair_id"], row["source"], row["layer"]) == (example.pair_id, "Attention", 1)
        assert row["prompt"] == text["chosen"][:-1] and row["chosen"] == text["chosen"][-1]["content"]
        assert row["rejected"] == text["rejected"][-1]["content"]
        assert row["chosen"] in tokenizer.decode(row["chosen_ids"]) and row["prompt_ids"] == example.chosen.prompt_ids
        for place, side in enumerate(("chosen", "rejected")):
            assert row[f"{side}_ids"] == example.sides[place].response_ids
            assert torch.equal(torch.tensor(row[f"{side}_weights"]), example.weights[place].float())
            assert len(row[f"{side}_weights"]) == len(row[f"{side}_ids"]) and row[f"{side}_scale"] > 1
        assert row["pair_weight"] == 1.0 and 0 < row["chosen_coverage"] <= 1
    meta = json.loads(pq.read_schema(path).metadata[b"attnpo"])
    assert (meta["pairs"], meta["split"], meta["kind"]) == (TRAIN, "train", "distribution")
    assert meta["lengths"]["max_length"] == 512 and meta["weights"]["layer"] == 1 and meta["layers"] == [1]
    assert meta["model"] == str(world.model) and len(meta["tokenizer"]["tokenizer"]) == 64


def test_a_run_exports_as_json_lines_what_its_command_exports(world: World, tmp_path: Path) -> None:
    cfg = world.config("weights=decay", "experiment=none", "callbacks=none")
    assert run(cfg, tmp_path / "run") is not None
    attnpo.export_weights(tmp_path / "run.jsonl", run=tmp_path / "run", split="val")
    attnpo.export_weights(tmp_path / "same.parquet", world.overrides("weights=decay", "experiment=none"), split="val")
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = pq.read_table(tmp_path / "same.parquet").to_pylist()
    assert lines == rows and lines[0]["layer"] is None
    assert {row["chosen_scale"] for row in rows} == {1.0}  # factors
    meta = json.loads((tmp_path / "run.jsonl.meta.json").read_text(encoding="utf-8"))
    assert (meta["kind"], meta["split"], meta["pairs"]) == ("factor", "val", len(rows))
    with pytest.raises(UserError, match=r"got both"):
        attnpo.export_weights(tmp_path / "a.jsonl", ["seed=1"], run=tmp_path / "run")
    with pytest.raises(UserError, match=r"run=.*nowhere: this is not a run folder"):
        attnpo.export_weights(tmp_path / "a.jsonl", run=tmp_path / "nowhere")


def test_what_cannot_be_exported_is_refused_before_anything_runs(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str, *more: str, split: str = "train") -> str:
        with pytest.raises(UserError) as told:
            attnpo.export_weights(tmp_path / name, world.overrides("experiment=none", *more), split=split)
        return str(told.value)

    assert "expected a file with extension .parquet or .jsonl" in refused("weights.csv")
    assert "split must be one of train, val, got 'test'" in refused("a.jsonl", split="test")
    told = refused("a.jsonl", "weights=gradient", "objective=tidpo")
    assert "Gradient computes its weights in every training step" in told
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "this job has 2: fill the store first" in refused("a.jsonl")
    assert not list(tmp_path.iterdir())


def test_two_prompts_in_one_pair_are_refused(world: World, tmp_path: Path) -> None:
    rules = [f"lengths.{rule}" for rule in ("keep=end", "overlong=cut", "max_length=24", "max_prompt_length=16")]
    with pytest.raises(UserError, match=r"pair \w+: its two responses keep different parts of the prompt"):
        attnpo.export_weights(tmp_path / "a.jsonl", world.overrides("experiment=none", "weights=uniform", *rules))


# ------------------------------------------------------------------------------------------------ TRL

BETA, LR, WARMUP, CLIP, STEP = 0.5, 2e-3, 0.1, 1.0, 4


def documented_trainer() -> str:
    """The documented subclass as a module."""
    (block,) = [found for found in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "(DPOTrainer)" in found]
    return block


def test_the_documented_trainer_is_short() -> None:
    assert len([line for line in documented_trainer().splitlines() if line.strip()]) < 40


@pytest.mark.skipif(not TRL_PYTHON.is_file(), reason="no TRL environment (.venv-trl); `make trlweights` builds it")
def test_ten_losses_of_trl_on_exported_weights_are_ours(tmp_path: Path) -> None:
    world = build_world(tmp_path, train=10 * STEP, val=2)
    words = world.overrides(
        *WEIGHTS,
        f"objective.beta={BETA}",
        "batch.shuffle=false",
        f"optimizer.lr={LR}",
        f"optimizer.warmup={WARMUP}",
        "optimizer.warmup_from=zero",
        f"trainer.gradient_clip_val={CLIP}",
        "callbacks=none",
    )
    cfg = load("fit", words)
    assert run(cfg, tmp_path / "run") is not None
    ours = [row["train/loss"] for row in read_metrics(tmp_path / "run" / "metrics.csv") if "train/loss" in row]
    data = attnpo.export_weights(tmp_path / "weights.parquet", run=tmp_path / "run")
    trainer = tmp_path / "weighted_trainer.py"
    trainer.write_text(documented_trainer(), encoding="utf-8")
    given = {"trainer": str(trainer), "model": str(world.model), "data": str(data), "folder": str(tmp_path / "trl"),
             "beta": BETA, "lr": LR, "warmup": WARMUP, "clip": CLIP, "pairs": STEP}  # fmt: skip
    command = [str(TRL_PYTHON), str(Path(__file__).with_name("trl_losses.py")), json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert len(ours) == len(theirs["weighted"]) == 10
    gaps = [abs(one - other) for one, other in zip(ours, theirs["weighted"], strict=True)]
    assert max(gaps) < 1e-5, gaps
    apart = [abs(one - other) for one, other in zip(ours[1:], theirs["plain"][1:], strict=True)]
    assert min(apart[1:]) > 1e-3, apart
