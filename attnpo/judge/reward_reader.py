"""A causal reward model's attention: rows of the last token of each conversation, where the reward is read.

Right-padded batches of similar lengths; nothing above the deepest layer that is asked for is computed, nor the reward
itself. Whether the model's attention is what is read is tried once.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import torch
from transformers import PreTrainedModel

from attnpo.judge.attention_tap import PROBE, Enough, Probe, tapped
from attnpo.judge.base import JudgeReading
from attnpo.judge.reader import KERNEL, readings_of
from attnpo.models.backbone import eval_mode, final_hidden, vocabulary
from attnpo.models.generate import longest_first
from attnpo.models.trial import differ, probe_prompts, right_padded
from attnpo.schema import UserError


class RewardModel:
    """Reads attention from a Hugging Face model for sequence classification.

    Args:
        model: with a causal backbone (``load_model(..., reward=True)``).
        token_budget: most tokens per forward, padding included.
        kernel: "sdpa" or "blocks", as for a judge.
    """

    def __init__(self, model: PreTrainedModel, *, token_budget: int = 16384, kernel: str = KERNEL) -> None:
        self.model, self.token_budget, self.kernel = model, token_budget, kernel
        self._backbone = cast(PreTrainedModel, model.base_model)
        self._readable = False

    @property
    def num_layers(self) -> int:
        """Depth of the model; layers are counted 1..num_layers."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    @torch.inference_mode()
    def read(
        self, conversations: Sequence[Sequence[int]], *, layers: Sequence[int], per_head: bool = False
    ) -> list[JudgeReading]:
        """Returns the rows of each conversation's last token, in their order, on the CPU; 1-based ``layers`` as asked.

        UserError for a layer out of range, an empty conversation, and a model whose attention cannot be read.
        """
        outside = [layer for layer in layers if not 1 <= layer <= self.num_layers]
        if outside:
            raise UserError(
                f"layer {outside[0]} is not in 1..{self.num_layers} of this reward model (1 = first); set weights.layer"
            )
        lengths = [len(ids) for ids in conversations]
        if 0 in lengths:
            raise UserError(f"conversation {lengths.index(0)} has no token; check weights.chat_template")
        if conversations:
            self._require_readable()
        found: dict[int, JudgeReading] = {}
        with eval_mode(self.model), tapped(self._backbone, self.kernel):
            for batch in longest_first(lengths, lambda length: self.token_budget // length):
                probe = self._run([conversations[index] for index in batch], layers, per_head, stop=True)[0]
                wanted = [layer - 1 for layer in layers]
                found.update(
                    zip(batch, readings_of(probe, wanted, None, None, [lengths[i] for i in batch]), strict=True)
                )
        return [found[index] for index in range(len(conversations))]

    def _run(
        self, conversations: Sequence[Sequence[int]], layers: Sequence[int], per_head: bool, *, stop: bool
    ) -> tuple[Probe, torch.Tensor | None]:
        """Returns the filled probe of one batch, and the last tokens' hidden states [batch d] unless the forward
        stopped.
        """
        ids, last = right_padded(conversations, self.model.device)
        wanted = [layer - 1 for layer in layers]
        probe = Probe(last, wanted, depth=self.num_layers, per_head=per_head, rollout=False, stop=stop)
        hidden = None
        with suppress(Enough):
            states = final_hidden(self._backbone, ids, **{PROBE: probe})
            hidden = states[torch.arange(len(last), device=last.device), last]
        return probe, hidden

    def _require_readable(self) -> None:
        """Raises ``UserError`` unless reading the attention leaves the model's numbers as they are; tried once."""
        if self._readable:
            return
        kind, prompts = type(self.model).__name__, probe_prompts(vocabulary(self._backbone))
        ids, last = right_padded(prompts, self.model.device)
        with eval_mode(self.model):
            expected = final_hidden(self._backbone, ids)[torch.arange(len(last), device=last.device), last]
            try:
                with tapped(self._backbone, self.kernel):
                    probe, hidden = self._run(prompts, range(1, self.num_layers + 1), False, stop=False)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of any model
                words = " ".join(str(error).split())[:200]
                raise UserError(
                    f"weights.path: the attention of {kind} cannot be read ({type(error).__name__}: {words}); name "
                    "another reward model"
                ) from error
        if hidden is None or not probe.rows or differ(hidden, expected):
            raise UserError(
                f"weights.path: {kind} gives other numbers when its attention is read, so it is more than a softmax "
                "over the keys in view; name another reward model"
            )
        self._readable = True
