"""Two classes in plain Lightning: the page's lines run, and train as the command does, in one process or two."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnpo import PreferenceDataModule, PreferenceModule, Weigher
from attnpo.data.rules import BatchPlan
from attnpo.judge.judge import RunJudge
from attnpo.objectives.dpo import DPO
from attnpo.objectives.twdpo import TwDPO
from attnpo.run.run import run
from attnpo.schema import UserError
from attnpo.system.store import Store
from attnpo.text.chat import ChatFormat
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.uniform import Uniform
from tests.run.worlds import World, judge_loads
from tests.training.processes import in_two_processes

ROOT = Path(__file__).resolve().parents[2]
# Of Lightning's own, on the first fit of a process.
pytestmark = pytest.mark.filterwarnings("ignore")


def make_data(world: World, store: Path, *words: str) -> tuple[PreferenceDataModule, Any]:
    """Makes the data module of the command's configuration by hand."""
    cfg = world.config("weights=attention", "layout=padded", "callbacks=none", *words)
    chat = ChatFormat(AutoTokenizer.from_pretrained(world.model))
    data = PreferenceDataModule(
        cfg.data,
        chat,
        cfg.weights,
        reader=RunJudge(cfg.judge, cfg.model, chat),
        store=Store(store),
        lengths=cfg.lengths,
        align=cfg.align,
        plan=cfg.batch,
        seed=cfg.seed,
    )
    return data, cfg


def blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    return [block for block in found if "L.Trainer(" in block]


@pytest.mark.parametrize("page", ["docs/python_api.md", "README.md"])
def test_the_pages_lines_train(page: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks(page)
    assert len([line for line in block.splitlines() if line.strip()]) <= 20
    monkeypatch.chdir(tmp_path)
    block = block.replace("judge/pairwise.txt", "judge/testbed.txt")  # words that the tiny model's tokenizer has
    names: dict[str, Any] = {"MODEL": str(world.model), "PAIRS": str(world.data / "train.jsonl")}
    exec(compile(block, page, "exec"), names)
    assert names["module"].trainer.global_step in (1, 3)  # 11 pairs in steps of 32, as many epochs as the page has
    assert list((tmp_path / "store" / "weights").rglob("*.parquet"))


def test_plain_lightning_trains_as_the_command_does(world: World, tmp_path: Path) -> None:
    data, cfg = make_data(world, tmp_path / "store")
    result = run(cfg, tmp_path / "run")
    assert result is not None
    policy, reference = (AutoModelForCausalLM.from_pretrained(world.model) for _ in range(2))
    module = PreferenceModule(policy, reference, cfg.objective, cfg.optimizer)
    settings = cfg.trainer
    trainer = L.Trainer(
        max_epochs=settings.max_epochs,
        gradient_clip_val=settings.gradient_clip_val,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, data)
    assert trainer.global_step == result.steps == module.total_steps == 3
    for name in ("val/loss", "val/rewards/margins", "train/loss"):
        assert float(trainer.callback_metrics[name]) == result.metrics[name]


def test_a_second_run_asks_no_judge(world: World, tmp_path: Path) -> None:
    with judge_loads() as loads:
        make_data(world, tmp_path)[0].prepare_data()
        assert len(loads) == 1
        data = make_data(world, tmp_path)[0]
        data.prepare_data()
        data.setup("validate")
        data.setup("fit")  # which Lightning calls again, and which makes nothing again
        assert len(loads) == 1
    assert data.weigh() is data.weigh() and data.weigh().weighed.report.computed == 0  # type: ignore[union-attr]


def test_a_source_that_reads_a_model_needs_one(world: World, caplog: pytest.LogCaptureFixture) -> None:
    chat = ChatFormat(AutoTokenizer.from_pretrained(world.model))
    pairs = world.config().data
    with pytest.raises(UserError, match=r"the weight source Attention needs a model \(judge\).*pass reader="):
        PreferenceDataModule(pairs, chat, Attention())
    data = PreferenceDataModule(pairs, chat, Uniform(), plan=BatchPlan(4))
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = L.Trainer(max_steps=1, accumulate_grad_batches=3, **options)
    model = AutoModelForCausalLM.from_pretrained(world.model)
    trainer.fit(PreferenceModule(model, AutoModelForCausalLM.from_pretrained(world.model), DPO(beta=0.1)), data)
    assert trainer.global_step == 1
    assert "the Trainer's accumulate_grad_batches=3 is overridden by the planned 4" in caplog.messages


SCRIPT = """
import sys
import lightning as L
from pathlib import Path
from transformers import AutoModelForCausalLM
from attnpo import PreferenceModule
from tests.run.test_plain_lightning import make_data
from tests.run.worlds import World

model, pairs, store, own = sys.argv[1:]
data, cfg = make_data(World(Path(model), Path(pairs), Path(store)), Path(store))
policy, reference = (AutoModelForCausalLM.from_pretrained(model) for _ in range(2))
trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_progress_bar=False,
                    enable_checkpointing=False, use_distributed_sampler=own == "own")
trainer.fit(PreferenceModule(policy, reference, cfg.objective, cfg.optimizer), data)
print("trained", trainer.global_step, float(trainer.callback_metrics["val/loss"]))
"""


def test_two_processes_are_refused_without_weights_and_train_with_them(world: World, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    arguments = [str(script), str(world.model), str(world.data), str(tmp_path / "store")]
    codes, said = in_two_processes([*arguments, "planned"], tmp_path)
    assert codes == [1, 1] and said.count("weights are missing from the store, but this job has 2 processes") == 2, said
    make_data(world, tmp_path / "store")[0].prepare_data()
    codes, said = in_two_processes([*arguments, "planned"], tmp_path)
    assert codes == [0, 0], said
    (first, second) = [line for line in said.splitlines() if line.startswith("trained 3 ")]
    assert first == second
    codes, said = in_two_processes([*arguments, "own"], tmp_path)
    assert codes == [1, 1] and said.count("pass use_distributed_sampler=False to the Trainer") == 2, said


EARLY = "{early:{_target_:lightning.pytorch.callbacks.EarlyStopping,monitor:val/loss,stopping_threshold:100.0}}"


def test_the_command_takes_callbacks_of_ones_own(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["trainer.validate_every=1", "callbacks.samples=0", "callbacks.report=false"]
    monkeypatch.setenv("ATTNPO_ALLOW_TARGETS", "lightning")
    stopped = run(world.config(*words, f"callbacks.extra={EARLY}"), tmp_path / "stopped")
    assert stopped is not None and stopped.steps == 1  # any loss is below 100
    for extra, problem in {
        "{a:{_target_:lightning.pytorch.callbacks.EarlyStopping}}": r"callbacks.extra.a: .*monitor",
        "{a:{_target_:lightning.pytorch.Trainer}}": r"callbacks.extra.a._target_: expected a Lightning Callback, got",
        "{a:{_target_:os.path.join}}": r"callbacks.extra.a._target_: expected a class of attnpo, got os.path.join",
        "{a:{patience:3}}": r"callbacks.extra.a._target_: expected a class of attnpo, got None",
    }.items():
        with pytest.raises(UserError, match=problem):
            run(world.config(*words, f"callbacks.extra={extra}"), tmp_path / "refused")
    with pytest.raises(UserError, match=r"callbacks.extra.a: expected keys with _target_, got 3"):
        world.config("callbacks.extra={a:3}")
    assert not (tmp_path / "refused").exists()


def test_weights_in_hand_train_without_a_store(world: World) -> None:
    """As a data module weighs the same pairs, but for what float32 rounds: some processors round by the batch."""
    weigher = Weigher(world.model, template="judge/testbed.txt", max_length=512, max_response_length=200)
    rows = {split: [json.loads(line) for line in (world.data / f"{split}.jsonl").open()] for split in ("train", "test")}
    data = PreferenceDataModule.from_examples(*map(weigher.examples, rows.values()), plan=BatchPlan(4))
    again, _ = make_data(world, world.store, "judge.max_length=512", "judge.max_response_length=200")
    for mine, theirs in zip(data.train_batches.examples, again.train_batches.examples, strict=True):
        assert mine.pair_id == theirs.pair_id
        for one, other in zip(mine.weights, theirs.weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)  # the judge's batches have other shapes
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    models = [AutoModelForCausalLM.from_pretrained(world.model) for _ in range(2)]
    module = PreferenceModule(*models, TwDPO(beta=0.1))
    trainer.fit(module, data)
    assert trainer.global_step == module.total_steps == 3
