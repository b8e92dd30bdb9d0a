"""Settings of a verbalizer: who scores the parts of responses, and how. Light: read before a model is loaded."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from attnpo.config.files import find_file
from attnpo.models.spec import DTYPES
from attnpo.schema import (
    BOOKKEEPING,
    Generator,
    Sampling,
    check_choice,
    check_least,
)
from attnpo.weights.score_prompt import ScoreTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@runtime_checkable
class GeneratorMaker(Protocol):
    """Maker of a generator out of a loaded model in another way than free decoding."""

    def fingerprint(self) -> dict[str, object]:
        """Returns every setting that changes an answer."""

    def generator(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> Generator:
        """Returns the generator."""


@dataclass(frozen=True)
class Verbalizer:
    """Who scores the parts of responses, and how.

    ``template_file``: the user message, with {question} and {answer}; ``system_file``: the system message, if any.
    ``path`` None is the run's own model and chat format. A prompt that leaves no room for ``sampling.max_new_tokens``
    within ``max_length`` tokens (None: the positions of the model) drops its pair. A batch has at most ``batch_size``
    prompts and ``token_budget`` tokens; neither changes an answer beyond rounding. ``known_parts``: a component that
    feeds the parts to the model and reads their scores, for models that cannot quote.
    """

    template_file: str
    system_file: str | None = None
    path: str | None = None
    revision: str | None = None
    dtype: str = "float32"
    chat_template: str | None = None
    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=2048, temperature=0.0))
    batch_size: int = field(default=16, metadata=BOOKKEEPING)
    token_budget: int = field(default=65536, metadata=BOOKKEEPING)
    max_length: int | None = None
    known_parts: GeneratorMaker | None = None

    def __post_init__(self) -> None:
        check_choice("verbalizer.dtype", self.dtype, DTYPES)
        for name in ("batch_size", "token_budget", "max_length"):
            check_least("verbalizer", 1, **{name: getattr(self, name)})

    def template(self) -> ScoreTemplate:
        """Returns the wording, read from its files."""
        system = None if self.system_file is None else find_file(self.system_file, "verbalizer.system_file")
        return ScoreTemplate.from_files(find_file(self.template_file, "verbalizer.template_file"), system)

    def unread(self) -> dict[str, str]:
        """Keys without effect: greedy decoding draws nothing, the run's own model has its own revision and chat."""
        found: dict[str, str] = {}
        if self.sampling.temperature == 0:
            found |= dict.fromkeys(
                ("sampling.top_p", "sampling.top_k", "sampling.seed"), "verbalizer.sampling.temperature=0"
            )
        if self.path is None:
            own = "the verbalizer is the model itself (verbalizer.path=null)"
            found |= {"revision": own, "chat_template": own}
        return found
