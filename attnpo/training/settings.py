"""Settings of the training loop, its loggers and its callbacks: plain values without any heavy import."""

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
"""Value of ``validate_every`` that counts the epoch's steps, however many they are."""
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
"""Direction in which a metric is best (lowest or highest), by the metric's name below val/."""


def direction(monitor: str) -> str | None:
    """Returns "min" or "max" for a validation metric that can only be meant one way, None for any other name."""
    split, _, name = monitor.partition("/")
    return DIRECTIONS.get(name) if split == "val" else None


@dataclass(frozen=True)
class TrainerSettings:
    """Settings of Lightning's Trainer, under its own names.

    ``validate_every`` counts optimiser steps (paper: 500), or is "epoch". Under a launcher ``devices`` and
    ``num_nodes`` are the launcher's. ``strategy`` "auto" is one process or DDP; "fsdp" is FSDP2.
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
                "since half-precision masters lose small updates and casting rounds the rotary frequencies"
            )
        check_choice("trainer.strategy", self.strategy, STRATEGIES)
        if self.validate_every != EPOCH and (isinstance(self.validate_every, str) or self.validate_every < 1):
            raise UserError(
                f"trainer.validate_every must be at least 1 optimiser step, or {EPOCH}, got {self.validate_every!r}"
            )
        check_choice("trainer.accelerator", self.accelerator, ACCELERATORS)
        if not re.fullmatch(DEVICES, self.devices):
            raise UserError(
                f"trainer.devices must be auto, a number of at least 1 or a list as 0,1, got {self.devices!r}"
            )
        if self.max_steps != -1 and self.max_steps < 1:
            raise UserError(
                f"trainer.max_steps must be at least 1 optimiser step, or -1 to leave it to trainer.max_epochs, got "
                f"{self.max_steps}"
            )
        if self.max_epochs < 1 and (self.max_steps < 0 or self.max_epochs != -1):
            raise UserError(
                "trainer.max_epochs must be at least 1, or -1 to leave the end to trainer.max_steps where that is set, "
                f"got {self.max_epochs}"
            )
        check_at_least("trainer", 0, gradient_clip_val=self.gradient_clip_val)
        for name in ("num_nodes", "log_every_n_steps", "threads"):
            check_at_least("trainer", 1, **{name: getattr(self, name)})

    def unread(self) -> dict[str, str]:
        """Names keys without effect as the others stand: where steps end a run, epochs do not."""
        return {"max_epochs": f"trainer.max_steps={self.max_steps} ends the run"} if self.max_steps > 0 else {}


@dataclass(frozen=True)
class WandbSettings:
    """Weights & Biases; ``mode`` offline needs no account."""

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
    """CSV is always written; ``wandb`` adds a W&B run."""

    wandb: WandbSettings | None = None


@dataclass(frozen=True)
class CallbackSettings:
    """Parts that are kept of a run.

    ``checkpoints``: ``best/`` (by ``monitor``; ``mode`` min or max, None where it follows) and ``last/``, resumable
    Hugging Face folders; ``last/`` also every ``save_every`` steps. ``export_dtype``: number format of exported
    weights; null leaves them. ``extra``: Lightning callbacks by ``_target_`` with arguments. ``samples`` validation
    prompts are answered by policy and reference.
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
        """Raises UserError for a metric of training, for a missing mode and for one that contradicts the metric."""
        known = direction(self.monitor)
        if not self.monitor.startswith("val/"):
            raise UserError(
                f"callbacks.monitor={self.monitor} is no validation metric: expected val/NAME with NAME one of "
                f"{', '.join(DIRECTIONS)}, or another that validation logs with callbacks.mode=min or max"
            )
        if known is None and self.mode is None:
            raise UserError(
                f"callbacks.monitor={self.monitor} does not say which value is the best: expected val/NAME with NAME "
                f"one of {', '.join(DIRECTIONS)}; for another one set callbacks.mode=min or max"
            )
        if known is not None and self.mode not in (None, known):
            raise UserError(
                f"callbacks.mode={self.mode} would keep the worst checkpoint by callbacks.monitor={self.monitor}, "
                f"whose best value is the {known}imum: set callbacks.mode=null, which follows from the metric"
            )

    @property
    def direction(self) -> str:
        """Returns "min" or "max": which value of ``monitor`` is the best."""
        return self.mode or direction(self.monitor) or "min"


def total_steps(settings: TrainerSettings, steps_per_epoch: int) -> int:
    """Returns the number of optimiser steps of the whole run."""
    return settings.max_steps if settings.max_steps >= 0 else settings.max_epochs * steps_per_epoch


def check_tracker(settings: LoggerSettings) -> None:
    """Raises UserError when a W&B run is asked for without the package wandb. Call it before the long work."""
    if settings.wandb is None:
        return
    try:
        import wandb  # noqa: F401
    except ImportError as problem:
        raise UserError(
            f"logger=wandb needs the package wandb, which cannot be imported ({problem}): pip install wandb, or set "
            "logger=csv"
        ) from problem
