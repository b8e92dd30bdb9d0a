"""Records the log-probabilities of a live reference in the first epoch, so that later epochs read them from the store.

Decides when the log-probabilities are stored and read; the caller decides where to store them.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from attnpo.data.collate import TrainingExample
from attnpo.data.datamodule import PreferenceDataModule
from attnpo.schema import PreferenceBatch, UserError
from attnpo.training.module import PreferenceModule
from attnpo.training.resume_state import Checkpoint
from attnpo.weights.capture import LogpPair

log = logging.getLogger(__name__)


AT_ONCE = 1024  # micro-batches per write to the store

Examples = Mapping[str, Sequence[TrainingExample]]


class ReferenceRecorder(L.Callback):
    """Records the log-probabilities of a run's reference, and drops the reference once all are stored.

    ``store``: stores the log-probabilities of pairs. ``complete``: returns the examples of both splits with their
    log-probabilities, or None while any are missing. ``known``: ids of pairs that are already stored.
    """

    def __init__(
        self,
        store: Callable[[Mapping[str, LogpPair]], None],
        complete: Callable[[], Examples | None],
        known: Collection[str] = (),
    ) -> None:
        self._store, self._complete = store, complete
        self._known = set(known)
        self._seen: list[tuple[tuple[str, ...], Tensor, Tensor]] = []

    def __call__(self, batch: PreferenceBatch, logps: Tensor) -> None:
        """Records a batch's log-probabilities [rows R] on their device, because copying them to the CPU would block."""
        if self._known.issuperset(batch.pair_ids):
            return
        if len(self._seen) == AT_ONCE:
            self.flush()
        self._seen.append((batch.pair_ids, batch.main.response_mask.sum(1), logps.detach()))

    def flush(self) -> None:
        """Stores the log-probabilities of new pairs."""
        rows: dict[str, LogpPair] = {}
        for pair_ids, counts, logps in self._seen:
            values, lengths = logps.float().cpu(), counts.tolist()
            for place, pair_id in enumerate(pair_ids):
                if pair_id not in self._known:
                    sides = (place, len(pair_ids) + place)
                    chosen, rejected = (values[row, : lengths[row]].clone() for row in sides)
                    rows[pair_id] = (chosen, rejected)
        self._seen.clear()
        self._known |= rows.keys()
        if rows:
            self._store(rows)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stores the log-probabilities from the validation before the first step."""
        self.flush()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Switches the loaders to stored values and drops the reference once all processes have stored all pairs."""
        if not isinstance(pl_module, PreferenceModule) or pl_module.kept is None or trainer.current_epoch == 0:
            return
        examples, problem = None, None
        try:
            self.flush()
        except UserError as error:  # raised later, so that the other processes do not wait for this one
            problem = error
        trainer.strategy.barrier("reference log-probs are stored")
        if problem is None:
            examples = self._complete()
        if not trainer.strategy.reduce_boolean_decision(examples is not None, all=True) or examples is None:
            if problem is not None:
                raise problem
            log.info("reference log-probs: the last epoch did not cover all pairs, so the reference is still needed")
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, PreferenceDataModule)
        data.train_batches.examples, data.val_batches.examples = examples["train"], examples["val"]
        pl_module.reference = pl_module.kept = None
        torch.cuda.empty_cache()  # does nothing without a GPU
        log.info("reference log-probs: all pairs are stored, and the reference model is unloaded")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Checkpoint) -> None:
        """Stores the log-probabilities that a run resumed from this checkpoint will read."""
        self.flush()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stores the remaining log-probabilities."""
        self.flush()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stores the log-probabilities computed before the exception, if possible."""
        try:
            self.flush()
        except Exception as error:  # noqa: BLE001  # the exception that ended the training is the one to report
            log.warning("reference log-probs: those computed since the last checkpoint were not stored (%s)", error)
