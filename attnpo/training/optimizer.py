"""Optimiser settings: AdamW's hyperparameters, the learning-rate schedule, and the optimiser built from both."""

import logging
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnpo.schema import UserError, check_choice, check_range

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

MOMENTS = ("float32", "8bit")
WARMUPS = ("first", "zero")
SCHEDULES = ("cosine", "constant")


@dataclass(frozen=True)
class Optimizer:
    """AdamW with linear warm-up and cosine decay (paper appendix: lr 1e-6, warm-up ratio 0.1, cosine).

    ``warmup``: a share of all optimiser steps if below 1, otherwise a number of steps. ``warmup_from``: the first
    update uses a learning rate of lr / warm-up steps ("first") or 0 ("zero", as in Hugging Face's schedules).
    ``final_share``: share of lr at the end of the cosine. ``moments``: "8bit" uses 2 bytes per parameter instead of 8.
    ``stochastic_rounding``: for bfloat16 weights. ``decay_all``: also apply ``weight_decay`` to norms and biases.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: float = 0.1
    schedule: str = "cosine"
    final_share: float = 0.0
    moments: str = "float32"
    stochastic_rounding: bool = False
    warmup_from: str = "first"
    decay_all: bool = False

    def __post_init__(self) -> None:
        check_choice("optimizer.schedule", self.schedule, SCHEDULES)
        if not 0 <= self.warmup < math.inf:
            raise UserError(f"optimizer.warmup must be a share of all steps or a number of steps, got {self.warmup}")
        check_choice("optimizer.warmup_from", self.warmup_from, WARMUPS)
        check_range("optimizer", "(0, inf)", lr=self.lr, eps=self.eps)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optimizer.betas must be two numbers in [0, 1), got {list(self.betas)}")
        check_range("optimizer", "[0, inf)", weight_decay=self.weight_decay)
        check_range("optimizer", "[0, 1]", final_share=self.final_share)
        check_choice("optimizer.moments", self.moments, MOMENTS)
        if self.stochastic_rounding and self.moments != "8bit":
            raise UserError(
                f"optimizer.stochastic_rounding needs optimizer.moments=8bit, got moments={self.moments}: set both "
                "(optimizer=adamw8bit) or neither"
            )

    def check_rounding(self, formats: Collection[str]) -> None:
        """Raises UserError for stochastic rounding unless all ``formats`` (dtypes of trained weights) are bfloat16."""
        others = sorted({*formats} - {"bfloat16"})
        if self.stochastic_rounding and others:
            raise UserError(
                f"optimizer.stochastic_rounding needs trained weights in bfloat16, but they are {others[0]}: set "
                "model.dtype=bfloat16 (without model.lora) or optimizer.stochastic_rounding=false"
            )

    def unused_keys(self) -> dict[str, str]:
        """Lists keys that have no effect given the other settings, with the reason."""
        found: dict[str, str] = {}
        if not self.weight_decay:
            found["decay_all"] = "optimizer.weight_decay=0"
        if not self.warmup:
            found["warmup_from"] = "optimizer.warmup=0"
        if self.schedule == "constant":
            found["final_share"] = "optimizer.schedule=constant"
        return found

    def lr_factor(self, step: int, total: int) -> float:
        """Returns the learning-rate factor at ``step`` (0-based) of ``total`` optimiser steps."""
        warmup = math.ceil(self.warmup * total) if self.warmup < 1 else int(self.warmup)
        if step < warmup:
            return (step + (self.warmup_from == "first")) / warmup
        if self.schedule == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return self.final_share + (1 - self.final_share) * 0.5 * (1 + math.cos(math.pi * progress))

    def build(
        self, parameters: "Iterable[torch.nn.Parameter]", undecayed: "Collection[torch.nn.Parameter]" = ()
    ) -> "torch.optim.Optimizer":
        """Builds the optimiser over ``parameters``, without weight decay on ``undecayed`` unless ``decay_all`` is set.

        Raises ``UserError`` for 8-bit moments without torchao, and for stochastic rounding of weights that are not
        bfloat16.
        """
        import torch

        trained = list(parameters)
        groups = self._parameter_groups(trained, undecayed)
        if self.moments == "8bit":
            self.check_rounding({str(parameter.dtype).removeprefix("torch.") for parameter in trained})
            return self._make_8bit(groups)
        # The fused kernel avoids the parameter-sized temporaries of the default implementation.
        optimizer = torch.optim.AdamW(
            groups,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=can_fuse(trained) or None,
        )
        # True would mean that gradients arrive scaled (float16 training), and Lightning would refuse to clip them.
        optimizer._step_supports_amp_scaling = False
        return optimizer

    def _parameter_groups(
        self, trained: "list[torch.nn.Parameter]", undecayed: "Collection[torch.nn.Parameter]"
    ) -> "list[dict[str, object]]":
        """Splits the weights into parameter groups with and without decay; one group if decay makes no difference."""
        apart = set() if self.decay_all or not self.weight_decay else {id(parameter) for parameter in undecayed}
        groups: list[dict[str, object]] = [
            {"params": [parameter for parameter in trained if id(parameter) not in apart]},
            {"params": [parameter for parameter in trained if id(parameter) in apart], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def _make_8bit(self, groups: "list[dict[str, object]]") -> "torch.optim.Optimizer":
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise UserError(
                f"optimizer.moments=8bit needs the package torchao ({error}): pip install 'attnpo[opt8bit]', or set "
                "optimizer=adamw"
            ) from error
        log.info("optimizer.moments=8bit: torchao compiles its update in the first step, which takes up to a minute")
        optimizer: torch.optim.Optimizer = AdamW8bit(
            groups,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            bf16_stochastic_round=self.stochastic_rounding,
        )
        return optimizer


NORMS_AND_BIASES = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Name patterns of parameters without weight decay in Hugging Face's ``Trainer.get_decay_parameter_names``."""


def norm_and_bias_parameters(model: "torch.nn.Module") -> "list[torch.nn.Parameter]":
    """Returns the parameters that Hugging Face's Trainer does not decay: those matched by name and all LayerNorms."""
    from torch.nn import LayerNorm
    from transformers.trainer_pt_utils import get_parameter_names

    decayed = set(get_parameter_names(model, [LayerNorm], NORMS_AND_BIASES))  # type: ignore[no-untyped-call]
    return [one for name, one in model.named_parameters() if name not in decayed]


def can_fuse(parameters: "list[torch.nn.Parameter]") -> bool:
    """Returns whether one kernel can update all parameters: all on GPUs, or all on the CPU and none sharded."""
    from torch.distributed.tensor import DTensor

    kinds = {parameter.device.type for parameter in parameters}
    return kinds == {"cuda"} or (kinds == {"cpu"} and not any(isinstance(one, DTensor) for one in parameters))
