"""Holds the method in one file, ``experiments/minimal.py``, to the product: the same weights and losses."""

import ast
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnpo.config.compose import CONFIG_DIR
from attnpo.run.run import run
from attnpo.training.metrics_file import read_metrics
from experiments import minimal
from tests.run.made import make_inputs
from tests.run.worlds import World, build_world

SAME = [
    *("weights=attention", "reference=live", "model.dtype=float64", "judge.dtype=float64", "judge.low_label_mass=warn"),
    *("batch.pairs=2", "batch.micro=2", "batch.shuffle=false", "trainer.gradient_clip_val=null"),
    *("optimizer.lr=1e-3", "optimizer.schedule=constant", "optimizer.warmup=0", "default_beta=0.5"),
]
HOW = minimal.Settings(beta=0.5, lr=1e-3, pairs=2)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = build_world(tmp_path_factory.mktemp("world"), train=20, val=2)
    for file in made.data.glob("*.jsonl"):  # texts instead of messages
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        texts = [
            {"prompt": row["prompt"], **{side: row[side][-1]["content"] for side in minimal.SIDES}} for row in rows
        ]
        file.write_text("".join(f"{json.dumps(row)}\n" for row in texts), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def plain(world: World) -> tuple[torch.nn.Module, minimal.Tokenizer, list[minimal.Row], str]:
    """Model, tokenizer, pairs and wording of the judge, as the file reads them."""
    model = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float64, attn_implementation="eager")
    lines = (world.data / "train.jsonl").read_text(encoding="utf-8").splitlines()
    wording = (CONFIG_DIR / "judge" / "testbed.txt").read_text(encoding="utf-8").rstrip("\n")
    return model, AutoTokenizer.from_pretrained(world.model), [json.loads(line) for line in lines], wording


def test_the_weights_are_those_of_the_product(
    world: World, plain: tuple[torch.nn.Module, minimal.Tokenizer, list[minimal.Row], str]
) -> None:
    model, tokenizer, rows, wording = plain
    examples = make_inputs(world.config(*SAME)).examples["train"].examples
    assert len(examples) == len(rows) == 20
    for row, example in zip(rows, examples, strict=True):
        weighed = minimal.weigh(model, tokenizer, wording, row, layer=-1)
        for place, side in enumerate(minimal.SIDES):
            assert minimal.encode(tokenizer, row["prompt"], row[side]) == (
                example.sides[place].prompt_ids,
                example.sides[place].response_ids,
            )
            torch.testing.assert_close(weighed[side][0].float(), example.weights[place], rtol=1e-5, atol=1e-8)
            assert weighed[side][1] == example.lengths[place]


def test_ten_steps_have_the_losses_of_the_product(
    world: World, plain: tuple[torch.nn.Module, minimal.Tokenizer, list[minimal.Row], str], tmp_path: Path
) -> None:
    run(world.config(*SAME), tmp_path / "run")
    wanted = [row["train/loss"] for row in read_metrics(tmp_path / "run" / "metrics.csv") if "train/loss" in row]
    found = list(minimal.train(*plain, HOW))
    assert len(found) == 10 and found[-1] < found[0] - 0.01
    assert found == pytest.approx(wanted, rel=1e-6)


def test_it_is_short_and_has_nothing_of_the_package() -> None:
    text = Path(minimal.__file__).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    modules = {
        name.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert {str(name).partition(".")[0] for name in modules} - sys.stdlib_module_names == {"torch", "transformers"}


def test_its_command_trains_and_saves(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, folder = str(world.data / "train.jsonl"), tmp_path / "policy"
    monkeypatch.setattr(sys, "argv", ["minimal", str(world.model), data, str(folder), "--pairs", "10", "--lr", "1e-3"])
    minimal.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0] == "step 1: loss 0.693147"
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
