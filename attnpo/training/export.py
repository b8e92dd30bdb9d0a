"""Trained policies as plain Hugging Face folders."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


def full_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """The state dict with sharded tensors gathered (a collective: every rank must call it), on the CPU."""
    state = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        state[name] = whole.detach().cpu()
    return state


@dataclass(frozen=True)
class Exporter:
    """What goes into a Hugging Face folder beside the weights."""

    tokenizer: PreTrainedTokenizerBase

    def export(self, model: PreTrainedModel, folder: Path, *, write: bool = True) -> None:
        """Nothing; writes weights, config, generation config, tokenizer and chat template that from_pretrained loads.

        ``write`` is false on ranks that only take part in gathering shards.
        """
        state = full_state(model)
        if not write:
            return
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder, state_dict=state)
        self.tokenizer.save_pretrained(folder)
        log.info("exported the policy to %s", folder)
