"""What ``attnpo.generate`` was asked for. Light: checked before anything that loads a model is imported."""

from dataclasses import asdict, dataclass

from attnpo.config import Root
from attnpo.data.prompts import PromptSource
from attnpo.models.spec import ModelSpec
from attnpo.schema import Sampling, check_choice, check_least
from attnpo.training.settings import ACCELERATORS


@dataclass(frozen=True)
class AnswerRules:
    """How prompts are answered, beside the sampling.

    ``per_prompt`` answers are drawn for each. A batch has at most ``batch_size`` prompts and ``token_budget`` tokens
    (padded prompts and room for answers); neither changes a draw. A prompt that leaves no room for
    ``sampling.max_new_tokens`` within ``max_length`` tokens (None: the positions of the model) is left out.
    """

    per_prompt: int = 1
    batch_size: int = 32
    token_budget: int = 65536
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_least("answers", 1, **asdict(self))


@dataclass(frozen=True)
class AnswerConfig(Root):
    """The whole of what ``attnpo.generate`` composes."""

    model: ModelSpec
    data: PromptSource
    sampling: Sampling
    answers: AnswerRules
    trainer: dict[str, str]
    output: str | None = None

    def __post_init__(self) -> None:
        check_choice("trainer.accelerator", self.trainer.get("accelerator", "auto"), ACCELERATORS)
