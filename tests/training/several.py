"""Trains the tiny model as one of several gloo processes; started by test_processes.py, never by hand.

Usage: python several.py FOLDER. The process's place comes from the variables that torchrun sets. Every case leaves
``FOLDER/<case>/metrics.csv``; a sharded one also leaves its whole final weights in ``final.pt``, one that is stopped
the error of every process in ``error<rank>.txt``.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.distributed.tensor import DTensor

from attnpo.data.datamodule import PreferenceDataModule
from attnpo.data.rules import BatchPlan
from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.models.compiled import compile_blocks
from attnpo.schema import UserError
from attnpo.training.checkpoints import BestCheckpoint, LastCheckpoint
from attnpo.training.export import Exporter
from attnpo.training.gather import FullPolicyGather, SmallestTokenBudgets
from attnpo.training.module import PreferenceModule
from attnpo.training.resume_state import ExactResume
from attnpo.training.settings import TrainerSettings, total_steps
from tests.training.stored import epoch_order, spoil, stored_data, stored_reference
from tests.training.tiny import Copies, Rows, make_data, make_examples, make_module, train

STOP = 2  # the optimiser step after which the checkpointing cases keep a copy to resume from
CLIP = 0.05  # far below the gradients that occur, so that clipping has to be right too


@dataclass(frozen=True)
class Case:
    """One training run of two epochs in steps of 8.

    ``resumes`` names the case whose copy at STOP it continues. ``part`` trains the second layer alone. ``bad`` gives
    the second process's share of step 2 a pair whose loss is not finite. ``poison`` leaves no number in the second
    process's share of the weights after step 2. ``tokens`` is a budget instead of ``micro``; of an ``uneven``
    one the second process has chosen twice as much. ``compiled`` blocks are recomputed, too.
    """

    strategy: str
    micro: int
    pairs: int = 20
    checkpoints: bool = False
    resumes: str | None = None
    part: bool = False
    bad: bool = False
    poison: bool = False
    tokens: int | None = None
    uneven: bool = False
    compiled: bool = False


CASES = {
    "ddp, one pair at a time": Case("ddp", 1),
    "ddp, five pairs in the last step": Case("ddp", 2, pairs=21),
    "ddp, one pair left over": Case("ddp", 2, pairs=17),
    "fsdp, one pair at a time": Case("fsdp", 1, checkpoints=True),
    "fsdp, resumed": Case("fsdp", 1, resumes="fsdp, one pair at a time"),
    "fsdp, a layer": Case("fsdp", 2, checkpoints=True, part=True),
    "fsdp, a layer, resumed": Case("fsdp", 2, resumes="fsdp, a layer", part=True),
    "fsdp, a budget of tokens": Case("fsdp", 1, pairs=21, tokens=50),
    "ddp, budgets of two sizes": Case("ddp", 1, tokens=40, uneven=True),
    "ddp, a bad pair": Case("ddp", 2, bad=True),
    "fsdp, a bad pair": Case("fsdp", 2, bad=True),
    "fsdp, compiled": Case("fsdp", 2, compiled=True),
    "fsdp, poisoned": Case("fsdp", 2, checkpoints=True, poison=True),
}


class Poison(L.Callback):
    """Leaves a NaN in the second process's share of the last trained weight, after step STOP."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *rest: Any) -> None:
        if trainer.global_step == STOP and trainer.global_rank == 1:
            weight = list(pl_module.parameters())[-1]
            with torch.no_grad():
                (weight.to_local() if isinstance(weight, DTensor) else weight).view(-1)[0] = float("nan")


def make(
    case: Case, plan: BatchPlan, settings: TrainerSettings, devices: int
) -> tuple[PreferenceModule, PreferenceDataModule]:
    """The case's module, which knows the run's number of steps, and its data."""
    examples = make_examples(case.pairs)
    if case.bad:
        examples = stored_reference(examples)
        bad = bad_pair(case, plan)
        examples[bad] = spoil(examples[bad], float("nan"))
    data = stored_data(examples, plan) if case.bad else make_data(examples, plan)
    module = make_module(total_steps(settings, data.steps_per_epoch(devices)), live=not case.bad)
    module.recipe = replace(module.recipe, weight_decay=0.1)  # two groups of weights
    if case.compiled:
        module.policy.model.activation_checkpointing_enable(every_n_layers=2)
        compile_blocks(module.policy.model, "eager")
    if case.part:
        module.policy.requires_grad_(False)
        module.policy.model.model.layers[1].requires_grad_(True)
    return module, data


def bad_pair(case: Case, plan: BatchPlan) -> int:
    """The pair before the last of step 2: of two processes, the second has it."""
    return epoch_order(case.pairs, plan)[14]


def run_case(case: Case, folder: Path, place: Path, devices: int) -> Rows:
    """The rows of metrics.csv; every process has to call it."""
    budget = case.tokens
    if budget and case.uneven:
        budget *= 1 + int(os.environ["RANK"])
    plan = BatchPlan(8, None if budget else case.micro, None if budget else 2, tokens=budget, eval_tokens=budget)
    settings: dict[str, object] = {"max_epochs": 2, "devices": str(devices), "strategy": case.strategy}
    settings |= {"validate_every": 1, "gradient_clip_val": CLIP}
    whole = FullPolicyGather()
    callbacks: list[L.Callback] = [Poison()] if case.poison else []
    callbacks += [ExactResume(), whole]
    if case.checkpoints:
        exporter = Exporter(build_tokenizer(Grammar()))
        callbacks += [BestCheckpoint(place / "best", exporter), LastCheckpoint(place / "last", exporter)]
        callbacks.append(Copies(place, STOP))
    module, data = make(case, plan, TrainerSettings(**settings), devices)  # type: ignore[arg-type]
    if case.uneven:
        callbacks.append(SmallestTokenBudgets(data))
    resume = None if case.resumes is None else folder / case.resumes / f"{STOP}.ckpt"
    try:
        rows = train(module, data, place, *callbacks, resume=resume, **settings)
    except UserError as error:
        if not (case.bad or case.poison):
            raise
        (place / f"error{os.environ['RANK']}.txt").write_text(str(error))
        return []
    if case.uneven:
        assert data.token_budgets == (case.tokens, case.tokens), "the least of both processes"
    if module.sharded:
        first = os.environ["RANK"] == "0"
        assert whole.state is not None and bool(whole.state) == first, "kept on one process alone"
        if first:
            torch.save(whole.state, place / "final.pt")
    else:
        assert whole.state is None
    return rows


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for name, case in CASES.items():
        run_case(case, folder, folder / name, devices=2)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
