"""Settings of a judge: model, prompts, and what is read from the model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum

from attnpo.config.named_files import find_file
from attnpo.models.spec import AUTO, DTYPES
from attnpo.objectives.base import LengthFrom
from attnpo.schema import BOOKKEEPING, Sampling, UserError, check_at_least, check_choice, check_range
from attnpo.text.alignment import AlignMethod
from attnpo.text.traces import CLOSE

TOKEN_BUDGET = 16384  # tokens of one forward pass of a judge
WARN, STOP = "warn", "stop"


# Increase by hand with every code change that changes a trace, or the numbers that are read after it.
TRACE_VERSION = "1"


@dataclass(frozen=True)
class TraceRules:
    """Settings of the reasoning that a judge generates before its verdict (config node ``judge.trace``).

    A trace ends with the text ``until``. If the model has not generated that text after ``max_new_tokens`` tokens, or
    ends its turn earlier, the trace is closed with it and counts as cut. ``temperature`` 0 is greedy decoding; samples
    are keyed by ``seed`` and by the prompt, that is, by the pair and the order of its answers.
    """

    max_new_tokens: int
    until: str = CLOSE
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        self.sampling()
        if not self.until.strip():
            raise UserError(f"until: expected the text that ends a trace, e.g. {CLOSE}, got {self.until!r}")

    def sampling(self) -> Sampling:
        """Returns the decoding settings."""
        return Sampling(self.max_new_tokens, self.temperature, self.top_p, self.top_k, self.seed)

    def unused_keys(self) -> dict[str, str]:
        """Lists keys that have no effect with greedy decoding, which does not sample."""
        return dict.fromkeys(("top_p", "top_k", "seed"), "judge.trace.temperature=0") if self.temperature == 0 else {}

    def fingerprint(self) -> dict[str, object]:
        """Returns all settings that affect a trace."""
        drawn = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "seed": self.seed}
        return {
            "max_new_tokens": self.max_new_tokens,
            "until": self.until,
            **(drawn if self.temperature > 0 else {}),
            "code": TRACE_VERSION,
        }


class Assembly(Enum):
    """TEXT tokenises the rendered text (paper); IDS splices the training token ids between the template's parts."""

    TEXT = "text"
    IDS = "ids"


class SpanMode(Enum):
    """TOUCH: all tokens that contain a character of the response. REFERENCE: the official code's shorter span."""

    TOUCH = "touch"
    REFERENCE = "reference"


class Turns(Enum):
    """Conversation shown to the judge before the responses: ALL of it, or only its LAST user turn (official code)."""

    ALL = "all"
    LAST = "last"


@dataclass(frozen=True)
class JudgeRules:
    """Settings of the judge's prompts.

    template_file: text file with the wording. assembly, span, turns: see the enums. span_closing, span_drop: a
    reference span ends ``span_drop`` tokens before the first token of ``span_closing``, which follows both answers in
    the wording (None: before the first visible character after the answer). max_length: prompts of this many tokens or
    more are truncated. max_response_length: tokens that each response keeps in a truncated prompt. labels: letters of
    the first and second answer. strip: strip whitespace from both ends of the responses (official code; under IDS the
    training ids decide). chat: the wording is a user message in the chat template; otherwise it is the whole prompt.
    prefill: beginning of the judge's reply up to the letter, appended at the end (None: nothing). trace: how the judge
    reasons before it replies (None: not at all); prompt, trace and prefill together stay within max_length.
    """

    template_file: str
    assembly: Assembly = Assembly.TEXT
    span: SpanMode = SpanMode.TOUCH
    span_closing: str | None = None
    span_drop: int = 2
    max_length: int = 2048
    max_response_length: int = 768
    labels: tuple[str, str] = ("A", "B")
    strip: bool = True
    chat: bool = True
    turns: Turns = Turns.ALL
    prefill: str | None = None
    trace: TraceRules | None = None

    def __post_init__(self) -> None:
        check_at_least("judge", 1, max_length=self.max_length, max_response_length=self.max_response_length)
        check_at_least("judge", 0, span_drop=self.span_drop)
        if self.span_closing == "":
            raise UserError("judge.span_closing: expected text that follows both answers, or null, got an empty string")
        if self.prefill == "":
            raise UserError("judge.prefill: expected the beginning of a reply, or null, got an empty string")
        if self.labels[0] == self.labels[1]:
            raise UserError(f"judge.labels: expected two different labels, got {self.labels[0]} twice")


@dataclass(frozen=True)
class Judge(JudgeRules):
    """Settings of a judge: its prompt rules (``JudgeRules``) and its model.

    ``path`` None means the run's own model and chat format. ``chat_template_kwargs``: values for variables of the
    judge's chat template ({enable_thinking: false}); None uses ``model.chat_template_kwargs`` if the judge is the run's
    own model, and no values otherwise. ``verdict`` also reads the two label logits, which requires the full depth;
    without it, the forward pass stops after the deepest stored layer. ``token_budget``: tokens per forward pass; "auto"
    uses as many as fit according to the memory estimate, or ``TOKEN_BUDGET`` without an estimate. ``other``: a
    different model is required, so ``path`` None means a model that ``prepare`` has not built yet, never the run's own.
    ``min_label_mass``: required total probability of both labels at the verdict position, averaged over the first
    prompts. The default is one half: below that, the judge is more likely to generate something other than a verdict.
    ``low_label_mass``: whether to warn or stop if the judge is below this minimum before weights are computed.
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
        check_range("judge", "[0, 1]", min_label_mass=self.min_label_mass)

    def unused_keys(self) -> dict[str, str]:
        """Lists keys that have no effect because the wording is the whole prompt, without a chat template."""
        idle = not self.chat and self.chat_template_kwargs is not None
        return {"chat_template_kwargs": "judge.chat=false"} if idle else {}

    def prompt_rules(self, positions: int | None = None) -> JudgeRules:
        """Returns only the prompt rules, with the template's path resolved.

        ``positions``: the judge's maximum number of positions, to which prompts are truncated; None if it states no
        limit.
        """
        plain = JudgeRules(**{item.name: getattr(self, item.name) for item in fields(JudgeRules)})
        length = plain.max_length if positions is None else min(plain.max_length, positions)
        path = str(find_file(self.template_file, "judge.template_file"))
        return replace(plain, template_file=path, max_length=length)


@dataclass(frozen=True)
class OtherJudge:
    """Alternative judge of an experimental setting, used by ``judge=other``.

    ``path`` None means the judge that ``prepare`` builds. ``layer`` is the layer to read. ``align`` and ``length_from``
    are the values of ``align.method`` and ``objective.length_from`` that suit its tokenizer: levenshtein and source if
    it is the run's own tokenizer, otherwise characters and train.
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
        check_at_least("other_judge", 1, max_length=self.max_length, max_response_length=self.max_response_length)
