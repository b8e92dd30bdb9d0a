"""Which models a run holds: the policy it trains, with adapters or without, and the reference it is held against."""

from omegaconf import DictConfig
from transformers import PreTrainedModel

from attnpo.models.loading import load_model
from attnpo.models.lora import AdapterOff, add_lora, require_peft
from attnpo.models.scored import ScoredLM
from attnpo.schema import UserError
from attnpo.studies.inputs import Ground
from attnpo.training.module import frozen

REFERENCES = ("live", "cached", "adapter_off")


def load_start(ground: Ground) -> PreTrainedModel:
    """The model that training starts from, in eval mode and without adapters."""
    model = ground.model
    return load_model(
        model.path, dtype=model.dtype, attn_implementation=model.attn_implementation, revision=model.revision
    )


def load_policy(ground: Ground) -> ScoredLM:
    """The model to train; under ``model.lora`` with fresh adapters, which change no number before the first step."""
    model = load_start(ground)
    if ground.model.lora is not None:
        add_lora(model, ground.model.lora)
    policy = ScoredLM(model)
    if ground.model.gradient_checkpointing:
        policy.model.activation_checkpointing_enable()
    return policy


def check_reference(ground: Ground) -> None:
    """Nothing; refuses what ``check_policy_config`` refuses. Loads nothing."""
    check_policy_config(ground.cfg)


def check_policy_config(cfg: DictConfig) -> None:
    """Nothing; reads the composed config alone, so that it can come before data and judge.

    Raises ``UserError`` for a kind of reference that does not exist, for ``adapter_off`` without an adapter, and for
    adapters without peft.
    """
    if cfg.reference not in REFERENCES:
        raise UserError(f"reference={cfg.reference}: expected one of {', '.join(REFERENCES)}")
    has_lora = cfg.model.get("lora") is not None
    if cfg.reference == "adapter_off" and not has_lora:
        raise UserError(
            "reference=adapter_off needs a fresh adapter, and model.lora is null: set model=lora, or reference=live or "
            "cached"
        )
    if has_lora:
        require_peft()


def load_reference(ground: Ground, policy: ScoredLM) -> ScoredLM | None:
    """The reference at hand during training: a frozen copy, or the policy without its adapters; None if cached."""
    if ground.cfg.reference == "cached":
        return None
    if ground.cfg.reference == "adapter_off":
        return AdapterOff(policy)
    reference = ScoredLM(load_start(ground))
    frozen(reference)
    return reference
