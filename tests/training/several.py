"""Trains the tiny model as one of several gloo processes; started by test_processes.py, never by hand.

Usage: python several.py FOLDER. The process's place comes from the variables that torchrun sets. Every case leaves
``FOLDER/<case>/metrics.csv``; one that checkpoints also leaves its final weights in ``final.pt``.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch

from attnpo.data.rules import BatchPlan
from attnpo.testbed.grammar import Grammar
from attnpo.testbed.tokenizer import build_tokenizer
from attnpo.training.callbacks import FinalValidation, FolderCheckpoint
from attnpo.training.export import Exporter, full_state
from attnpo.training.loggers import make_loggers
from attnpo.training.metrics_file import merge_metrics
from attnpo.training.settings import LoggerSettings, TrainerSettings
from attnpo.training.trainer import make_trainer, quiet_lightning
from tests.training.tiny import make_data, make_examples, make_module

STOP = 2  # the optimiser step behind which the checkpointing cases keep a copy to resume from
CLIP = 0.05  # far below the gradients that occur, so that clipping has to be right too


@dataclass(frozen=True)
class Case:
    """One training run of two epochs in steps of 8; ``resumes`` names the case whose copy at STOP it continues."""

    strategy: str
    micro: int
    pairs: int = 20
    checkpoints: bool = False
    resumes: str | None = None


CASES = {
    "ddp, one pair at a time": Case("ddp", 1),
    "ddp, two at a time": Case("ddp", 2),
    "ddp, five pairs in the last step": Case("ddp", 2, pairs=21),
    "ddp, one pair left over": Case("ddp", 2, pairs=17),
    "fsdp, one pair at a time": Case("fsdp", 1, checkpoints=True),
    "fsdp, two at a time": Case("fsdp", 2),
    "fsdp, resumed": Case("fsdp", 1, resumes="fsdp, one pair at a time"),
}


class Keep(L.Callback):
    """Saves a copy behind step STOP."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and trainer.global_step == STOP:
            trainer.save_checkpoint(self.path)


def run_case(case: Case, folder: Path, place: Path, devices: int) -> list[dict[str, float]]:
    """The rows of metrics.csv; every process has to call it."""
    steps = 2 * (-(-case.pairs // 8))
    plan = BatchPlan(8, case.micro, eval_micro=2)
    settings = TrainerSettings(
        max_epochs=2,
        accelerator="cpu",
        devices=str(devices),
        strategy=case.strategy,
        validate_every=1,
        gradient_clip_val=CLIP,
    )
    callbacks: list[L.Callback] = [FinalValidation(steps)]
    if case.checkpoints:
        tokenizer = build_tokenizer(Grammar())
        callbacks += [
            FolderCheckpoint(place / "best", Exporter(tokenizer), "val/loss"),
            FolderCheckpoint(place / "last", Exporter(tokenizer)),
        ]
        callbacks.append(Keep(place / "stop.ckpt"))
    module, data = make_module(steps), make_data(make_examples(case.pairs), plan)
    with quiet_lightning():
        trainer = make_trainer(settings, make_loggers(LoggerSettings(), place, {}), callbacks, place, 1)
        trainer.accumulate_grad_batches = plan.accumulation(trainer.world_size)
        if case.resumes is None:
            trainer.validate(module, data, verbose=False)
            trainer.fit(module, data)
        else:
            trainer.fit(module, data, ckpt_path=folder / case.resumes / "stop.ckpt", weights_only=True)
    if case.checkpoints:
        state = full_state(module.policy.model)
        if trainer.is_global_zero:
            torch.save(state, place / "final.pt")
    return merge_metrics(place) if trainer.is_global_zero else []


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for name, case in CASES.items():
        run_case(case, folder, folder / name, devices=2)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
