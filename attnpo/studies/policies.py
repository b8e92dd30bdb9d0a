"""Which models a run holds: the policy it trains and, if the reference is live, the frozen copy it starts from."""

from transformers import PreTrainedModel

from attnpo.models.loading import load_model
from attnpo.models.scored import ScoredLM
from attnpo.schema import UserError
from attnpo.studies.inputs import Ground
from attnpo.training.module import frozen

REFERENCES = ("live", "cached")


def load_start(ground: Ground) -> PreTrainedModel:
    """The model that training starts from, in eval mode."""
    model = ground.model
    return load_model(
        model.path, dtype=model.dtype, attn_implementation=model.attn_implementation, revision=model.revision
    )


def load_policy(ground: Ground) -> ScoredLM:
    """The model to train."""
    policy = ScoredLM(load_start(ground))
    if ground.model.gradient_checkpointing:
        policy.model.activation_checkpointing_enable()
    return policy


def check_reference(ground: Ground) -> None:
    """Nothing; refuses a kind of reference that does not exist."""
    if ground.cfg.reference not in REFERENCES:
        raise UserError(f"reference={ground.cfg.reference}: expected one of {', '.join(REFERENCES)}")


def load_reference(ground: Ground, policy: ScoredLM) -> ScoredLM | None:
    """The frozen reference that stays in memory during training, or None when its log-probs come from the store."""
    if ground.cfg.reference == "cached":
        return None
    reference = ScoredLM(load_start(ground))
    frozen(reference)
    return reference
