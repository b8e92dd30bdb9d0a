"""A run's reward model: described cheaply, loaded once, and only when something is missing in the store."""

from collections.abc import Mapping

import torch

from attnpo.config.named_files import read_template
from attnpo.judge.judge import AttentionReader
from attnpo.judge.layers import Depth
from attnpo.judge.reader import RewardModel
from attnpo.models.described import token_rows
from attnpo.models.loading import described, load_model, load_tokenizer, model_depth, text_config
from attnpo.schema import UserError
from attnpo.text.chat import ChatFormat
from attnpo.weights.sources.reward_attention import LoadedReward, RewardAttention


class RunReward(AttentionReader):
    """A reward model that is described cheaply and loaded at most once.

    Args:
        source: the weights that name it. UserError when they name none, and for a tokenizer without characters.
        fallback: chat template for a tokenizer without one.
    """

    name, done = "reward model", "read"

    def __init__(self, source: RewardAttention, fallback: str | None = None) -> None:
        if source.path is None:
            raise UserError(
                "weights=reward_attention reads a reward model, and weights.path is null: set "
                "weights.path=FOLDER_OR_HUB_NAME"
            )
        self.settings, self.path, self.revision, self.dtype = source, source.path, source.revision, source.dtype
        self.tokenizer = load_tokenizer(self.path, self.revision)
        rows = token_rows(text_config(self.path, self.revision))
        template = read_template(source.chat_template, "weights.chat_template")
        self.chat = ChatFormat(self.tokenizer, template, fallback=fallback, part="weights", rows=rows)

    @property
    def num_layers(self) -> Depth:
        """Depth, with the layers that have attention, from its config alone; UserError when none can be read."""
        found = described(self.path, self.revision)
        if found.mapped or not found.layers:
            raise UserError(
                f"weights.path={self.path}: no layer of {found.name} has softmax attention that can be read, since "
                "none goes through transformers' AttentionInterface; name another reward model"
            )
        return Depth(model_depth(self.path, self.revision), found.layers)

    def describe_pass(self, rows: str) -> str:
        """Returns in words what a pass does that reads ``rows``."""
        return f"reward model: reading {rows} of {self.path} on both responses"

    def fingerprint_of_prompts(self) -> Mapping[str, object]:
        """Returns what identifies the conversations that it reads."""
        return self.chat.fingerprint()

    def load(self, device: torch.device) -> LoadedReward:
        """Model and conversations for capturing; loads the model onto ``device``."""
        model = load_model(self.path, dtype=self.settings.dtype, revision=self.revision, reward=True)
        model.to(device)  # type: ignore[arg-type]
        reader = RewardModel(model, token_budget=self.settings.token_budget, kernel=self.kernel)
        return LoadedReward(reader, self.chat)
