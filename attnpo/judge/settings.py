"""Settings of a judge: which model judges, how it is asked, and what is read of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from attnpo.config.files import find_file
from attnpo.judge.prompts import JudgeRules
from attnpo.models.spec import AUTO, DTYPES
from attnpo.objectives.base import LengthFrom
from attnpo.schema import BOOKKEEPING, UserError, check_choice, check_least
from attnpo.text.alignment import AlignMethod

TOKEN_BUDGET = 16384  # tokens of a judge's forward
WARN, STOP = "warn", "stop"


@dataclass(frozen=True)
class Judge(JudgeRules):
    """Prompt rules of a judge (``JudgeRules``) and its model.

    ``path`` None is the run's own model and chat format. ``chat_template_kwargs``: values of variables that the judge's
    chat template reads ({enable_thinking: false}); None takes ``model.chat_template_kwargs`` where the judge is the
    run's own model, and none for another. ``verdict`` also reads the two label logits, which runs the
    full depth; without it the forward stops after the deepest stored layer. ``token_budget`` is tokens per forward;
    "auto": as many as the memory estimate finds room for, ``TOKEN_BUDGET`` where it cannot be asked.
    ``other``: another model is meant, so ``path`` None is one that ``prepare`` has yet to build, never the own model.
    ``min_label_mass``: the probability that both labels together should have at the verdict position, in the mean over
    the first prompts; one half, since below it the judge more likely writes something else there than a verdict.
    ``low_label_mass``: warn or stop, what a judge below it does to a pass that is not paid for yet.
    """

    path: str | None = None
    revision: str | None = None
    dtype: str = "float32"
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, object] | None = field(default=None, hash=False)
    verdict: bool = True
    token_budget: int | str = field(default=TOKEN_BUDGET, metadata=BOOKKEEPING)
    other: bool = False
    min_label_mass: float = field(default=0.5, metadata=BOOKKEEPING)
    low_label_mass: str = field(default=WARN, metadata=BOOKKEEPING)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("judge.dtype", self.dtype, DTYPES)
        check_choice("judge.low_label_mass", self.low_label_mass, (WARN, STOP))
        if self.token_budget != AUTO and (isinstance(self.token_budget, str) or self.token_budget < 1):
            raise UserError(f"judge.token_budget must be at least 1, or {AUTO}, got {self.token_budget!r}")
        if not 0 <= self.min_label_mass <= 1:
            raise UserError(f"judge.min_label_mass: expected a probability from 0 to 1, got {self.min_label_mass}")

    def unread(self) -> dict[str, str]:
        """Keys without effect: a wording that is the whole prompt goes through no chat template."""
        idle = not self.chat and self.chat_template_kwargs is not None
        return {"chat_template_kwargs": "judge.chat=false"} if idle else {}

    def rules(self, positions: int | None = None) -> JudgeRules:
        """Returns the prompt rules alone, with the template's path settled, for a judge of as many ``positions``.

        Prompts are cut to what the judge can read. None: a judge that states no end.
        """
        plain = JudgeRules(**{item.name: getattr(self, item.name) for item in fields(JudgeRules)})
        length = plain.max_length if positions is None else min(plain.max_length, positions)
        path = str(find_file(self.template_file, "judge.template_file"))
        return replace(plain, template_file=path, max_length=length)


@dataclass(frozen=True)
class OtherJudge:
    """Other judge of a setting, which ``judge=other`` takes its keys from.

    ``path`` None is the model that ``prepare`` builds as one. ``layer`` is the one to read, ``align`` and
    ``length_from`` are what its tokens ask of ``align.method`` and ``objective.length_from``: levenshtein and source
    for the run's own tokenizer, characters and train for another.
    """

    template_file: str
    path: str | None = None
    revision: str | None = None
    chat_template: str | None = None
    dtype: str = "float32"
    max_length: int = 2048
    max_response_length: int = 768
    layer: int | str = "last"
    align: AlignMethod = AlignMethod.LEVENSHTEIN
    length_from: LengthFrom = LengthFrom.SOURCE

    def __post_init__(self) -> None:
        check_choice("other_judge.dtype", self.dtype, DTYPES)
        check_least("other_judge", 1, max_length=self.max_length, max_response_length=self.max_response_length)
