"""What ``attnpo.generate`` was asked for. Light: checked before anything that loads a model is imported."""

from dataclasses import asdict, dataclass

from attnpo.config.compose import Root
from attnpo.data.prompts import PromptSource
from attnpo.evaluation.answers.base import AnsweringBackend
from attnpo.models.spec import ModelSpec
from attnpo.schema import Sampling, check_choice, check_least
from attnpo.training.settings import ACCELERATORS


@dataclass(frozen=True)
class AnswerRules:
    """How many answers there are: ``per_prompt`` are drawn for each prompt."""

    per_prompt: int = 1

    def __post_init__(self) -> None:
        check_least("answers", 1, **asdict(self))


@dataclass(frozen=True)
class AnswerConfig(Root):
    """The whole of what ``attnpo.generate`` composes."""

    model: ModelSpec
    data: PromptSource
    sampling: Sampling
    answers: AnswerRules
    answering: AnsweringBackend
    trainer: dict[str, str]
    output: str | None = None

    def __post_init__(self) -> None:
        check_choice("trainer.accelerator", self.trainer.get("accelerator", "auto"), ACCELERATORS)
