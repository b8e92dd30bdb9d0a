"""A run's components as plain values, and which of them go together.

Light: read before anything heavy is loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attnpo.config_files import find_file
from attnpo.data.base import PairSet
from attnpo.data.rules import BatchPlan
from attnpo.models.spec import DTYPES, FULL, ModelSpec
from attnpo.objectives.base import LengthFrom, PreferenceObjective
from attnpo.schema import BOOKKEEPING, Generator, Kind, PreferencePair, Sampling, UserError, check_choice, check_least
from attnpo.testbed.prepare import Prepared, PreparedJudge
from attnpo.text.alignment import AlignMethod
from attnpo.text.judge_template import JudgeRules
from attnpo.text.score_prompt import ScoreTemplate
from attnpo.training.optimizer import Optimizer
from attnpo.training.settings import TrainerSettings
from attnpo.weights.base import WeightSource, is_neutral

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


AUTO = "auto"
TOKEN_BUDGET = 16384  # tokens of a judge's forward
LAYER = "weights.layer"
CHOICE = "auto_layer"
"""Where the record of a choice stands: the folder in the store, the key in ``RunContext.prepared`` and in a result."""


@dataclass(frozen=True)
class AutoLayer:
    """How ``weights.layer=auto`` finds its layer (config node ``auto_layer``).

    ``pairs``: the calibration sample, training pairs in the order of their ids. The top-weighted ``shares`` of the
    tokens are removed and compared with ``draws`` random removals (keyed by ``seed``) of as many tokens from the same
    places, an even number so that the judge's liking for a place cancels. Takes pairs x layers x shares x (2 + draws)
    judge prompts.
    """

    pairs: int = 64
    shares: tuple[float, ...] = (0.1, 0.2, 0.4)
    draws: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        check_least("auto_layer", 1, pairs=self.pairs, draws=self.draws)
        if not self.shares or not all(0 < share < 1 for share in self.shares):
            raise UserError(f"auto_layer.shares: expected shares between 0 and 1, got {list(self.shares)}")


def is_auto(layer: object) -> bool:
    """Whether a value of ``weights.layer`` asks for the layer to be found."""
    return isinstance(layer, str) and layer.strip().lower() == AUTO


def wants_auto(source: WeightSource) -> bool:
    """Whether the layer of the weights is yet to be found. UserError when it would not be read."""
    if not is_auto(getattr(source, "layer", None)):
        return False
    layers = getattr(source, "layers", ())
    if layers:
        raise UserError(
            f"weights.layer=auto finds one layer, and weights.layers={list(layers)} names those to read: leave one of "
            "them out"
        )
    return True


WARN, STOP = "warn", "stop"


@runtime_checkable
class JudgePreparer(Protocol):
    """A ``prepare`` component that can also build another model to judge."""

    def prepare_judge(self, root: Path) -> PreparedJudge:
        """Where it is, built if it is missing."""


@dataclass(frozen=True)
class Judge(JudgeRules):
    """The judge's prompt rules (``JudgeRules``) and its model.

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
        """The prompt rules alone, with the template's path settled, for a judge of as many ``positions``.

        Prompts are cut to what the judge can read. None: a judge that states no end.
        """
        plain = JudgeRules(**{item.name: getattr(self, item.name) for item in fields(JudgeRules)})
        length = plain.max_length if positions is None else min(plain.max_length, positions)
        path = str(find_file(self.template_file, "judge.template_file"))
        return replace(plain, template_file=path, max_length=length)


@dataclass(frozen=True)
class OtherJudge:
    """The other judge of a setting, which ``judge=other`` takes its keys from.

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


REFERENCES = ("live", "cached", "first_epoch", "adapter_off")


@runtime_checkable
class PairReader(Protocol):
    """Where pairs come from (config node ``data``)."""

    def load(self, split: str) -> PairSet:
        """The pairs of a split."""


@runtime_checkable
class Preparer(Protocol):
    """What builds model and data first (config node ``prepare``)."""

    def prepare(self, root: Path) -> Prepared:
        """Where the artefacts are."""


@runtime_checkable
class Truth(Protocol):
    """What scores a policy against a known truth (config node ``truth``)."""

    def score(self, *arguments: Any, **named: Any) -> Any:
        """The scores."""

    def base_answers(self, *arguments: Any, **named: Any) -> Any:
        """The base's answers to the prompts of a split, to be sampled once for several scores."""

    def decisive(self, pair: PreferencePair, side: str, places: Sequence[tuple[int, int]]) -> list[bool]:
        """Whether each token, given by its characters of the response, decides the true reward."""

    def is_flipped(self, pair: PreferencePair) -> bool:
        """Whether the rejected response is truly the better one."""


@dataclass(frozen=True)
class DriftSettings:
    """On how much it is measured where the policy moved (config node ``drift``); first in the order of ids or prompts.

    ``pairs``: validation pairs, for the KL by token; 0 measures nothing. ``train_pairs``: training pairs, for the
    ranking accuracy. ``answers``: answers sampled from the policy, for the KL by token; none where no ``truth`` samples
    them.
    """

    pairs: int = 0
    train_pairs: int = 256
    answers: int = 96

    def __post_init__(self) -> None:
        check_least("drift", 0, pairs=self.pairs)
        check_least("drift", 1, train_pairs=self.train_pairs, answers=self.answers)


def require_reader(source: WeightSource, objective: PreferenceObjective) -> None:
    """Raises UserError for weights that cost something and that the objective would not read."""
    if "factors" in objective.requires and source.kind is not Kind.FACTOR:
        raise UserError(
            f"objective {type(objective).__name__} reads factors, and weights are {type(source).__name__}, a "
            "distribution: set weights=transport (OTPO's own) or weights=gradient (TI-DPO's)"
        )
    if not is_neutral(source) and "token_weights" not in objective.requires:
        raise UserError(
            f"objective {type(objective).__name__} reads no token weights, so those of {type(source).__name__} would "
            "be computed for nothing: set weights=uniform, or an objective that reads weights (objective=twdpo)"
        )


def require_reference(reference: str, objective: PreferenceObjective) -> None:
    """Raises UserError for an objective that asks more of its reference than stored log-probs can say."""
    more = sorted(name for name in objective.requires if name.partition(":")[0] in ("joint", "ahead", "group"))
    if reference in ("cached", "first_epoch") and more and "reference" in objective.requires:
        raise UserError(
            f"objective {type(objective).__name__} needs the reference itself ({', '.join(more)}), and "
            f"reference={reference} keeps one number per token of the pairs: set reference=live (model=lora: "
            "adapter_off)"
        )


def require_pairs(batch: BatchPlan, objective: PreferenceObjective) -> None:
    """Raises UserError for steps of one pair under an objective that compares pairs of a step."""
    if "several_pairs" in objective.requires and batch.pairs < 2:
        raise UserError(
            f"objective {type(objective).__name__} compares the pairs of an optimiser step with each other: expected "
            f"batch.pairs of at least 2, got {batch.pairs}"
        )


def require_margin(objective: PreferenceObjective, source: WeightSource, trainer: TrainerSettings) -> None:
    """Raises UserError for what a reward model cannot be trained with: its rewards are no log-probabilities."""
    plain = objective.requires <= {"token_weights"} and getattr(objective, "sft_coef", None) == 0
    if not plain:
        raise UserError(
            f"model.reward=true gives rewards instead of log-probabilities, and objective {type(objective).__name__} "
            "reads more of the policy than their margin: set objective=cpo objective.sft_coef=0 objective.beta=1"
        )
    if not is_neutral(source):
        raise UserError(
            f"model.reward=true: a reward stands on a response's last token, and {type(source).__name__} weighs "
            "tokens: set weights=uniform"
        )
    if trainer.strategy == "fsdp":
        raise UserError("model.reward=true is trained whole, and trainer.strategy=fsdp shards it: set auto")


LAYOUTS = ("auto", "padded", "packed", "shared_prefix")  # models.layouts.NAMES, which imports torch


def require_whole(trainer: TrainerSettings, objective: PreferenceObjective) -> None:
    """Raises UserError for sharded weights under an objective that samples from the policy."""
    if "group:anchor" in objective.requires and trainer.strategy == "fsdp":
        raise UserError(
            f"objective {type(objective).__name__} samples anchors from the whole policy, and trainer.strategy=fsdp "
            "shards it: set trainer.strategy=auto, or objective.gamma_triplet=0"
        )


def require_one_piece(trainer: TrainerSettings, model: ModelSpec) -> None:
    """Raises UserError for sharded weights in a form that this project does not shard."""
    if model.quantize is not None and trainer.strategy == "fsdp":
        raise UserError(
            f"model.quantize={model.quantize} works on whole weights, and trainer.strategy=fsdp shards them: set "
            "trainer.strategy=auto or model.quantize=null"
        )


def require_parts(reference: str, model: ModelSpec, optimizer: Optimizer) -> None:
    """Raises UserError for a kind of reference that does not exist or cannot be, and for absent packages."""
    if reference not in REFERENCES:
        raise UserError(f"reference={reference}: expected one of {', '.join(REFERENCES)}")
    if reference == "adapter_off" and model.lora is None:
        raise UserError(
            "reference=adapter_off needs a fresh adapter, and model.lora is null: set model=lora, or reference=live or "
            "cached"
        )
    for wanted, package, extra, key in (
        (model.lora is not None, "peft", "lora", "model.lora"),
        (model.quantize is not None, "bitsandbytes", "qlora", "model.quantize"),
        (optimizer.moments == "8bit", "torchao", "opt8bit", "optimizer.moments=8bit"),
    ):
        if wanted and find_spec(package) is None:
            raise UserError(f"{key} needs the package {package}, which is not installed: pip install 'attnpo[{extra}]'")


def require_format(model: ModelSpec, optimizer: Optimizer) -> None:
    """Raises UserError for trained weights in a number format that loses small updates; adapters are in float32."""
    trained = model.dtype if model.lora is None else "float32"
    optimizer.check_rounding([trained])
    if trained not in FULL and not optimizer.stochastic_rounding:
        raise UserError(
            f"model.dtype={trained} trains all weights in that format, which loses the small updates of a usual "
            "optimizer.lr: set model.dtype=float32 (trainer.precision=bf16-mixed computes in bf16 all the same), "
            "model=lora, or model.dtype=bfloat16 optimizer=adamw8bit optimizer.stochastic_rounding=true"
        )


@runtime_checkable
class GeneratorMaker(Protocol):
    """What makes a generator out of a loaded model in another way than free decoding."""

    def fingerprint(self) -> dict[str, object]:
        """Every setting that changes an answer."""

    def generator(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> Generator:
        """The generator."""


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
        """The wording, read from its files."""
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
