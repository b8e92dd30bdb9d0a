"""Which model, from where, in what number format: plain settings without any heavy import."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSpec:
    """A causal LM: a local folder or a hub name.

    ``chat_template`` is a Jinja text or a path to one, for tokenizers that bring none. ``dtype`` is that of the
    weights: float32 masters for training (autocast is ``trainer.precision``'s business).
    """

    path: str
    revision: str | None = None
    dtype: str = "float32"
    attn_implementation: str = "sdpa"
    chat_template: str | None = None
    gradient_checkpointing: bool = False
