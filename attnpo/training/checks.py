"""Checks models before the first step (modes, number formats) and the weights of a checkpoint (names, shapes)."""

import torch
from torch import Tensor, nn

from attnpo.models.loading import check_rotary
from attnpo.models.lora import parents
from attnpo.schema import UserError
from attnpo.training.resume_state import Checkpoint


def check_ready(policy: nn.Module, reference: nn.Module | None, *, rounding: bool) -> None:
    """Raises ``UserError`` unless policy and reference are as training needs them.

    Called once the strategy has moved and converted them: every module of the policy in train mode, the reference in
    eval mode and without gradients, rotary frequencies in full precision, trained weights in float32. ``rounding``
    says that the optimiser rounds stochastically, so that trained weights may be shorter.
    """
    # Classes of the library may share an activation among all their models, which has one mode and needs none.
    others = set() if reference is None else set(policy.modules()) & set(reference.modules())
    common = {part for part in others if not list(part.parameters())}
    still = [name or "the whole" for name, part in policy.named_modules() if not part.training and part not in common]
    if still:
        raise UserError(
            f"{len(still)} modules of the policy stay in eval mode (first: {still[0]}), where dropout and gradient "
            "checkpointing are off; let that module's train() pass the mode on"
        )
    check_rotary(policy)
    require_full_precision(policy, rounding=rounding)
    if reference is None:
        return
    check_rotary(reference)
    if any(part.training for part in reference.modules() if part not in common) or any(
        p.requires_grad for p in reference.parameters()
    ):
        raise UserError("the reference must be in eval mode and without gradients; give it as module.frozen(reference)")


def require_full_precision(policy: nn.Module, *, rounding: bool) -> None:
    """Raises ``UserError`` where nothing is trained, or weights that lose small updates, as ``check_ready`` says."""
    trained = [(name, value) for name, value in policy.named_parameters() if value.requires_grad]
    if not trained:
        raise UserError("the policy has no parameter with requires_grad: nothing would be trained; unfreeze some")
    short = [(name, value.dtype) for name, value in trained if value.dtype not in (torch.float32, torch.float64)]
    if short and not rounding:
        raise UserError(
            f"{len(short)} of {len(trained)} trained parameters are not float32 (first: {short[0][0]}, {short[0][1]}), "
            "which loses the small updates of a usual lr; set model.dtype=float32, or load the policy by "
            'from_pretrained(MODEL, dtype="float32") (precision bf16-mixed computes in bf16 all the same), or take an '
            "optimizer with stochastic_rounding"
        )


def frozen_names(module: nn.Module) -> set[str]:
    """Returns the names of all parameters that are not trained, tied ones under each of their names."""
    return {name for name, value in module.named_parameters(remove_duplicate=False) if not value.requires_grad}


def keep_trained(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Removes from ``checkpoint["state_dict"]`` what is not trained, and notes names and shapes of what is left.

    What a frozen parameter's module stores beside it (the scales of a quantised weight: ``name.*``) goes with it.
    """
    state = checkpoint["state_dict"]
    frozen = frozen_names(module)
    for name in [name for name in state if not frozen.isdisjoint({name, *parents(name)})]:
        del state[name]
    checkpoint["trained"] = {name: list(value.shape) for name, value in state.items()}


def check_saved(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Raises ``UserError`` unless the checkpoint has every trained weight of ``module`` and none that it lacks.

    Only names and shapes are compared, since a strategy may have taken the weights themselves out already.
    """
    if "trained" not in checkpoint:
        raise UserError("resume: the file does not name the weights it holds, so it is no state.ckpt of this program")
    saved = checkpoint["trained"]
    shapes = {name: list(value.shape) for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    needed = [name for name, value in module.named_parameters(remove_duplicate=False) if value.requires_grad]
    missing = [name for name in needed if name not in saved]
    unexpected = [name for name in saved if name not in shapes]
    other = [
        f"{name} {list(saved[name])}, here {shape}"
        for name, shape in shapes.items()
        if list(saved.get(name, shape)) != shape
    ]
    problems = [
        f"{len(names)} {what} (first: {names[0]})"
        for names, what in ((missing, "missing"), (unexpected, "unexpected"), (other, "of another shape"))
        if names
    ]
    if problems:
        raise UserError(
            f"resume: the checkpoint's weights do not fit the {len(needed)} trained ones of this model: "
            f"{', '.join(problems)}. Resume with the model and adapter settings of the saved run"
        )
