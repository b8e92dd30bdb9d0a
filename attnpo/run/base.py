"""The model that training starts from, described and not loaded, with the store that keeps what was tried with it."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from attnpo.models.loading import attention_of, weights_fingerprint
from attnpo.models.spec import ModelSpec
from attnpo.system.store import Store
from attnpo.text.chat import ChatFormat


@dataclass(frozen=True)
class BaseModel:
    """Model that training starts from: its folder and formats, its chat format, where and how precisely it is run.

    ``precision``: that of the trainer, such as "bf16-mixed".
    """

    spec: ModelSpec
    chat: ChatFormat
    device: torch.device
    precision: str
    store: Store

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Returns the tokenizer of the training tokens."""
        return self.chat.tokenizer

    @property
    def is_mixed(self) -> bool:
        """Returns whether forward passes are computed in bf16."""
        return self.precision == "bf16-mixed"

    def autocast(self) -> torch.autocast:
        """Returns the number formats that the policy runs in, so that stored and live log-probabilities come the same
        way.
        """
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_mixed)

    def fingerprint(self) -> dict[str, object]:
        """Returns what identifies the reference's numbers: weights, number formats, attention kernel family."""
        return {
            "weights": weights_fingerprint(self.spec.path, self.spec.revision),
            "dtype": self.spec.dtype,
            "kernel": attention_of(self.spec.path, self.spec.revision, self.spec.attn_implementation),
            "precision": self.precision,
            **({} if self.spec.quantize is None else {"quantize": self.spec.quantize}),
        }
