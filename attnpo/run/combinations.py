"""Combinations of a run's components that are refused. Light: read before anything heavy is loaded."""

from importlib.util import find_spec

from attnpo.data.rules import BatchPlan
from attnpo.models.spec import FULL, ModelSpec
from attnpo.objectives.base import PreferenceObjective
from attnpo.schema import Kind, UserError
from attnpo.training.optimizer import Optimizer
from attnpo.training.settings import TrainerSettings
from attnpo.weights.base import WeightSource, is_neutral

AUTO = "auto"
LAYER = "weights.layer"
CHOICE = "auto_layer"
"""Where the record of a choice stands: the folder in the store, the key in ``RunContext.prepared`` and in a result."""


def is_auto(layer: object) -> bool:
    """Returns whether a value of ``weights.layer`` asks for the layer to be found."""
    return isinstance(layer, str) and layer.strip().lower() == AUTO


def wants_auto(source: WeightSource) -> bool:
    """Returns whether the layer of the weights is yet to be found. UserError when it would not be read."""
    if not is_auto(getattr(source, "layer", None)):
        return False
    layers = getattr(source, "layers", ())
    if layers:
        raise UserError(
            f"weights.layer=auto finds one layer, and weights.layers={list(layers)} names those to read: leave one of "
            "them out"
        )
    return True


REFERENCES = ("live", "cached", "first_epoch", "adapter_off")


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
