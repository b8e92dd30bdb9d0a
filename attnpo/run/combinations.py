"""Checks that a run's components can be combined. Runs before any heavy import."""

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
"""Name of the layer search record: its folder in the store and its key in ``RunContext.prepared`` and in results."""


def is_auto_layer(layer: object) -> bool:
    """Returns whether a value of ``weights.layer`` requests a layer search."""
    return isinstance(layer, str) and layer.strip().lower() == AUTO


def needs_layer_search(source: WeightSource) -> bool:
    """Returns whether a search for ``weights.layer`` is needed. Raises UserError if the result would not be used."""
    if not is_auto_layer(getattr(source, "layer", None)):
        return False
    layers = getattr(source, "layers", ())
    if layers:
        raise UserError(
            f"weights.layer=auto searches for one layer, but weights.layers={list(layers)} names the layers to read: "
            "remove one of these two settings"
        )
    return True


REFERENCES = ("live", "cached", "first_epoch", "adapter_off")


def require_usable_weights(source: WeightSource, objective: PreferenceObjective) -> None:
    """Raises UserError if the objective would not use the token weights, or needs a different kind of weights."""
    if "factors" in objective.requires and source.kind is not Kind.FACTOR:
        raise UserError(
            f"objective {type(objective).__name__} needs weights that are factors, but {type(source).__name__} returns "
            "a distribution: set weights=transport (as in OTPO) or weights=gradient (as in TI-DPO)"
        )
    if not is_neutral(source) and "token_weights" not in objective.requires:
        raise UserError(
            f"objective {type(objective).__name__} uses no token weights, so computing the weights of "
            f"{type(source).__name__} would be wasted effort: set weights=uniform, or an objective with token weights "
            "(objective=twdpo)"
        )


def require_reference(reference: str, objective: PreferenceObjective) -> None:
    """Raises UserError if the objective needs more from the reference than stored log-probabilities."""
    more = sorted(name for name in objective.requires if name.partition(":")[0] in ("joint", "ahead", "group"))
    if reference in ("cached", "first_epoch") and more and "reference" in objective.requires:
        raise UserError(
            f"objective {type(objective).__name__} needs the reference model ({', '.join(more)}), but "
            f"reference={reference} stores only the log-probs of the pairs' tokens: set reference=live (or, with "
            "model=lora, reference=adapter_off)"
        )


def require_pairs_per_step(batch: BatchPlan, objective: PreferenceObjective) -> None:
    """Raises UserError if the objective compares pairs within a step but each step has only one pair."""
    if "several_pairs" in objective.requires and batch.pairs < 2:
        raise UserError(
            f"objective {type(objective).__name__} compares pairs within an optimiser step, so "
            f"batch.pairs must be at least 2, got {batch.pairs}"
        )


def require_reward_model_fits(objective: PreferenceObjective, source: WeightSource, trainer: TrainerSettings) -> None:
    """Raises UserError for settings that need log-probabilities or sharding, which a reward model does not support."""
    plain = objective.requires <= {"token_weights"} and getattr(objective, "sft_coef", None) == 0
    if not plain:
        raise UserError(
            "model.reward=true trains a reward model, which has no log-probabilities, but objective "
            f"{type(objective).__name__} needs more than the reward margin: set objective=cpo objective.sft_coef=0 "
            "objective.beta=1"
        )
    if not is_neutral(source):
        raise UserError(
            f"model.reward=true scores a response only at its last token, but {type(source).__name__} returns token "
            "weights: set weights=uniform"
        )
    if trainer.strategy == "fsdp":
        raise UserError(
            "model.reward=true cannot be sharded, but trainer.strategy=fsdp shards it: set trainer.strategy=auto"
        )


LAYOUTS = ("auto", "padded", "packed", "shared_prefix")  # models.layouts.NAMES, which imports torch


def require_unsharded_policy(trainer: TrainerSettings, objective: PreferenceObjective) -> None:
    """Raises UserError if the objective samples from the policy but the policy's weights are sharded."""
    if "group:anchor" in objective.requires and trainer.strategy == "fsdp":
        raise UserError(
            f"objective {type(objective).__name__} can sample anchors only from an unsharded policy, but "
            "trainer.strategy=fsdp shards it: set trainer.strategy=auto, or objective.gamma_triplet=0"
        )


def require_unsharded_quantization(trainer: TrainerSettings, model: ModelSpec) -> None:
    """Raises UserError if a quantised model would be sharded, which is not supported."""
    if model.quantize is not None and trainer.strategy == "fsdp":
        raise UserError(
            f"model.quantize={model.quantize} needs unsharded weights, but trainer.strategy=fsdp shards them: set "
            "trainer.strategy=auto or model.quantize=null"
        )


def require_reference_and_packages(reference: str, model: ModelSpec, optimizer: Optimizer) -> None:
    """Raises UserError if the kind of reference is unknown or unsupported, or if a package is missing."""
    if reference not in REFERENCES:
        raise UserError(f"reference={reference}: expected one of {', '.join(REFERENCES)}")
    if reference == "adapter_off" and model.lora is None:
        raise UserError(
            "reference=adapter_off needs a new adapter, but model.lora is null: set model=lora, or reference=live or "
            "cached"
        )
    for wanted, package, extra, key in (
        (model.lora is not None, "peft", "lora", "model.lora"),
        (model.quantize is not None, "bitsandbytes", "qlora", "model.quantize"),
        (optimizer.moments == "8bit", "torchao", "opt8bit", "optimizer.moments=8bit"),
    ):
        if wanted and find_spec(package) is None:
            raise UserError(f"{key} needs the package {package}, which is not installed: pip install 'attnpo[{extra}]'")


def require_trainable_dtype(model: ModelSpec, optimizer: Optimizer) -> None:
    """Raises UserError if the trained weights have a dtype that loses small updates.

    Adapters are always trained in float32, so they are never affected.
    """
    trained = model.dtype if model.lora is None else "float32"
    optimizer.check_rounding([trained])
    if trained not in FULL and not optimizer.stochastic_rounding:
        raise UserError(
            f"model.dtype={trained} would lose the small updates of a typical optimizer.lr, because all weights are "
            "trained in that dtype: set model.dtype=float32 (trainer.precision=bf16-mixed still computes in bf16), "
            "model=lora, or model.dtype=bfloat16 optimizer=adamw8bit optimizer.stochastic_rounding=true"
        )
