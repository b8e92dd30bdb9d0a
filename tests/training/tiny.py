"""A tiny model, made-up examples, and their training."""

from collections.abc import Callable
from pathlib import Path

import lightning as L
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attnpo.data.collate import TrainingExample
from attnpo.data.datamodule import PreferenceDataModule
from attnpo.data.rules import BatchPlan
from attnpo.models.backbone import freeze
from attnpo.models.layouts import padded_layout
from attnpo.models.scored import ScoredLM
from attnpo.objectives.base import PreferenceObjective
from attnpo.objectives.twdpo import TwDPO
from attnpo.schema import EncodedResponse
from attnpo.training.loggers import make_loggers
from attnpo.training.metrics_file import merge_metrics
from attnpo.training.module import PreferenceModule
from attnpo.training.optimizer import Optimizer
from attnpo.training.settings import LoggerSettings, TrainerSettings
from attnpo.training.trainer import make_trainer, quiet_lightning

Rows = list[dict[str, float]]
Fit = Callable[..., Rows]  # the fixture ``fit``

VOCAB = 40


SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """Returns a two-layer Llama with grouped-query attention, random weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def make_examples(count: int, seed: int = 0) -> list[TrainingExample]:
    """Pairs of random ids with random weights; responses of 1 to 9 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(3, VOCAB, (length,), generator=generator).tolist()

    examples = []
    for i in range(count):
        prompt, sides, weights = ids(2, 8), [], []
        for _ in range(2):
            response = ids(1, 10)
            sides.append(EncodedResponse(prompt, response, [(j, j + 1) for j in range(len(response))]))
            row = torch.rand(len(response), generator=generator)
            weights.append(row / row.sum())
        lengths = (float(len(sides[0].response_ids)), float(len(sides[1].response_ids)))
        examples.append(TrainingExample(f"pair{i}", sides[0], sides[1], (weights[0], weights[1]), lengths, (1.0, 1.0)))
    return examples


def make_data(train: list[TrainingExample], plan: BatchPlan, val: int = 5, seed: int = 0) -> PreferenceDataModule:
    return PreferenceDataModule.from_examples(
        train, make_examples(val, seed=99), padded_layout, 0, plan, seed, epochs=2
    )


def make_module(
    steps: int, objective: PreferenceObjective | None = None, live: bool = True, lr: float = 1e-2
) -> PreferenceModule:
    reference = freeze(ScoredLM(tiny_model())) if live else None
    optimizer = Optimizer(lr=lr, warmup=2.0)
    return PreferenceModule(ScoredLM(tiny_model()), reference, objective or TwDPO(0.5), optimizer, steps)


# ---------------------------------------------------------------------------------------------------- training


class Copies(L.Callback):
    """Checkpoints FOLDER/STEP.ckpt, saved after each validation within training, or after that of one step."""

    def __init__(self, folder: Path, step: int | None = None) -> None:
        self.folder, self.step = folder, step
        folder.mkdir(parents=True, exist_ok=True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and self.step in (None, trainer.global_step):
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt", weights_only=False)


def train(
    module: PreferenceModule,
    data: PreferenceDataModule,
    place: Path,
    *callbacks: L.Callback,
    resume: Path | None = None,
    **settings: object,
) -> Rows:
    """Validates, trains on the CPU and returns the rows of metrics.csv, on the first process."""
    made = TrainerSettings(**{"accelerator": "cpu", "devices": "1", **settings})  # type: ignore[arg-type]
    with quiet_lightning():
        loggers = make_loggers(LoggerSettings(), place, {})
        trainer = make_trainer(made, loggers, [*callbacks], place, 1)
        trainer.accumulate_grad_batches = data.accumulation_steps(trainer.world_size)
        if resume is None:
            trainer.validate(module, data, verbose=False)
        trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    return merge_metrics(place) if trainer.is_global_zero else []


def column(rows: Rows, name: str = "train/loss") -> list[float]:
    return [row[name] for row in rows if name in row]
