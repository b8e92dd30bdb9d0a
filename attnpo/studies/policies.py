"""Which models a run holds: the policy it trains, with adapters or without, and the reference it is held against."""

from transformers import PreTrainedModel

from attnpo.models.compiled import compile_blocks, require_same_numbers
from attnpo.models.layouts import Layout
from attnpo.models.loading import load_model
from attnpo.models.lora import AdapterOff, add_lora
from attnpo.models.scored import ScoredLM
from attnpo.studies.ground import Ground, device_of
from attnpo.training.module import frozen


def load_start(ground: Ground) -> PreTrainedModel:
    """The model that training starts from, in eval mode and without adapters."""
    model = ground.model
    return load_model(
        model.path,
        dtype=model.dtype,
        attn_implementation=model.attn_implementation,
        revision=model.revision,
        quantize=model.quantize,
        device=device_of(ground.cfg),
    )


def load_policy(ground: Ground) -> ScoredLM:
    """The model to train; under ``model.lora`` with fresh adapters, which change no number before the first step."""
    model = load_start(ground)
    if ground.model.lora is not None:
        add_lora(model, ground.model.lora)
    policy = ScoredLM(model)
    if ground.model.gradient_checkpointing:
        policy.model.activation_checkpointing_enable(every_n_layers=ground.model.checkpoint_every)
    return policy


def compile_policy(ground: Ground, policy: ScoredLM, layout: Layout) -> None:
    """Nothing; compiles the blocks of a policy that is to be trained in ``layout``, if ``model.compile`` says so.

    Raises ``UserError`` where compiled blocks do not run, or give other numbers than plain ones.
    """
    backend = ground.model.compile
    if backend is not None:
        autocast = ground.cfg.trainer.precision == "bf16-mixed"
        require_same_numbers(policy.model, backend, layout, device_of(ground.cfg), autocast=autocast)
        compile_blocks(policy.model, backend)


def load_reference(ground: Ground, policy: ScoredLM) -> ScoredLM:
    """The reference that is run during training: a frozen copy, or the policy without its adapters."""
    if ground.cfg.reference == "adapter_off":
        return AdapterOff(policy)
    reference = ScoredLM(load_start(ground))
    frozen(reference)
    return reference
