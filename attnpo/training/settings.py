"""Settings of the trainer, loggers and callbacks, as plain values without heavy imports."""

import re
from dataclasses import dataclass, field

from attnpo.config.reader import Untouched
from attnpo.models.spec import DTYPES
from attnpo.schema import BOOKKEEPING, UserError, check_at_least, check_choice

PRECISIONS = ("32-true", "bf16-mixed")
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")
DEVICES = r"auto|-1|0*[1-9]\d*|\d+,(\d+(,\d+)*)?"
STRATEGIES = ("auto", "ddp", "fsdp")
EPOCH = "epoch"
"""Value of ``validate_every`` for validating once per epoch."""
DIRECTIONS = {
    "loss": "min",
    "losses/preference": "min",
    "losses/sft": "min",
    "rewards/kl": "min",
    "rewards/triplet": "min",
    "rewards/chosen": "max",
    "rewards/rejected": "min",
    "rewards/margins": "max",
    "rewards/accuracies": "max",
    "rewards/unweighted/chosen": "max",
    "rewards/unweighted/rejected": "min",
    "logps/chosen": "max",
    "logps/rejected": "min",
}
"""Direction in which each metric is best (lowest or highest value), by name without val/."""


def monitor_mode(monitor: str) -> str | None:
    """Returns "min" or "max" for a validation metric with a known best direction, None for any other name."""
    split, _, name = monitor.partition("/")
    return DIRECTIONS.get(name) if split == "val" else None


@dataclass(frozen=True)
class TrainerSettings:
    """Settings for Lightning's Trainer, with Lightning's names where they exist.

    ``validate_every``: a number of optimiser steps (paper: 500), or "epoch". A launcher's values override ``devices``
    and ``num_nodes``. ``strategy``: "auto" is one process or DDP, "fsdp" is FSDP2.
    """

    max_epochs: int = 1
    max_steps: int = -1
    gradient_clip_val: float | None = 1.0
    accelerator: str = field(default="auto", metadata=BOOKKEEPING)
    devices: str = field(default="auto", metadata=BOOKKEEPING)
    num_nodes: int = field(default=1, metadata=BOOKKEEPING)
    strategy: str = field(default="auto", metadata=BOOKKEEPING)
    precision: str = "32-true"
    validate_every: int | str = 500
    log_every_n_steps: int = field(default=1, metadata=BOOKKEEPING)
    threads: int | None = field(default=None, metadata=BOOKKEEPING)
    progress: bool = field(default=True, metadata=BOOKKEEPING)

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UserError(
                f"trainer.precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}: weights stay fp32, "
                "because half-precision weights lose small updates and casting rounds the rotary frequencies"
            )
        check_choice("trainer.strategy", self.strategy, STRATEGIES)
        if self.validate_every != EPOCH and (isinstance(self.validate_every, str) or self.validate_every < 1):
            raise UserError(
                f"trainer.validate_every must be at least 1 optimiser step, or {EPOCH}, got {self.validate_every!r}"
            )
        check_choice("trainer.accelerator", self.accelerator, ACCELERATORS)
        if not re.fullmatch(DEVICES, self.devices):
            raise UserError(
                f"trainer.devices must be auto, a number of at least 1 or a list like 0,1, got {self.devices!r}"
            )
        if self.max_steps != -1 and self.max_steps < 1:
            raise UserError(
                f"trainer.max_steps must be at least 1 optimiser step, or -1 to train for trainer.max_epochs, got "
                f"{self.max_steps}"
            )
        if self.max_epochs < 1 and (self.max_steps < 0 or self.max_epochs != -1):
            raise UserError(
                f"trainer.max_epochs must be at least 1, or -1 if trainer.max_steps ends the run, got {self.max_epochs}"
            )
        check_at_least("trainer", 0, gradient_clip_val=self.gradient_clip_val)
        for name in ("num_nodes", "log_every_n_steps", "threads"):
            check_at_least("trainer", 1, **{name: getattr(self, name)})

    def unused_keys(self) -> dict[str, str]:
        """Lists keys that have no effect given the other settings: ``max_epochs`` if ``max_steps`` ends the run."""
        return {"max_epochs": f"trainer.max_steps={self.max_steps} ends the run"} if self.max_steps > 0 else {}


@dataclass(frozen=True)
class WandbSettings:
    """Settings of Weights & Biases; ``mode`` "offline" needs no account."""

    project: str = "attnpo"
    name: str | None = None
    group: str | None = None
    mode: str = "online"
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in ("online", "offline"):
            raise UserError(f"logger.wandb.mode must be online or offline, got {self.mode!r}; logger=csv turns it off")


@dataclass(frozen=True)
class LoggerSettings:
    """Settings of the loggers: CSV is always written; ``wandb`` adds a W&B run."""

    wandb: WandbSettings | None = None


@dataclass(frozen=True)
class CallbackSettings:
    """Settings for a run's checkpoints, samples and report.

    ``checkpoints``: save ``best/`` and ``last/`` as resumable Hugging Face folders. ``monitor`` selects the best one;
    ``mode`` is min or max, or None for the metric's own direction. ``save_every``: also save ``last/`` at this interval
    in steps. ``export_dtype``: dtype of exported weights; null keeps the model's. ``extra``: Lightning callbacks by
    ``_target_`` with arguments. ``samples``: number of validation prompts for which the policy and the
    reference generate responses.
    """

    checkpoints: bool = True
    monitor: str = "val/loss"
    mode: str | None = None
    save_every: int | None = None
    samples: int = 4
    sample_tokens: int = 64
    report: bool = True
    heat_maps: int = 4
    export_dtype: str | None = None
    extra: dict[str, Untouched] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.mode is not None:
            check_choice("callbacks.mode", self.mode, ("min", "max"))
        check_at_least("callbacks", 0, samples=self.samples, heat_maps=self.heat_maps)
        check_at_least("callbacks", 1, sample_tokens=self.sample_tokens, save_every=self.save_every)
        if self.checkpoints:
            self._check_monitor()
        if self.export_dtype is not None:
            check_choice("callbacks.export_dtype", self.export_dtype, DTYPES)

    def _check_monitor(self) -> None:
        """Raises UserError for a training metric, and for a mode that is missing or contradicts the metric."""
        known = monitor_mode(self.monitor)
        if not self.monitor.startswith("val/"):
            raise UserError(
                f"callbacks.monitor={self.monitor} is not a validation metric: expected val/NAME with NAME one of "
                f"{', '.join(DIRECTIONS)}, or any other validation metric, with callbacks.mode=min or max"
            )
        if known is None and self.mode is None:
            raise UserError(
                f"callbacks.monitor={self.monitor} has no known best direction: expected val/NAME with NAME one of "
                f"{', '.join(DIRECTIONS)}; for any other metric set callbacks.mode=min or max"
            )
        if known is not None and self.mode not in (None, known):
            raise UserError(
                f"callbacks.mode={self.mode} would keep the worst checkpoint by callbacks.monitor={self.monitor}, "
                f"whose best value is the {known}imum: set callbacks.mode=null to use the metric's own direction"
            )

    @property
    def monitor_mode(self) -> str:
        """Returns "min" or "max", depending on which value of ``monitor`` is best."""
        return self.mode or monitor_mode(self.monitor) or "min"


def total_steps(settings: TrainerSettings, steps_per_epoch: int) -> int:
    """Returns the number of optimiser steps of the whole run."""
    return settings.max_steps if settings.max_steps >= 0 else settings.max_epochs * steps_per_epoch


def check_wandb(settings: LoggerSettings) -> None:
    """Raises UserError if W&B is requested and the package wandb is missing. Call it before any long work."""
    if settings.wandb is None:
        return
    try:
        import wandb  # noqa: F401
    except ImportError as problem:
        raise UserError(
            f"logger=wandb needs the package wandb, which cannot be imported ({problem}): pip install wandb, or set "
            "logger=csv"
        ) from problem
