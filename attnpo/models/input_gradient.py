"""Measures each input token's influence on the next token: the gradient of one logit at the input embeddings.

The forward pass goes through ``ScoredLM``, so sharding, adapters and autocast apply. A hook captures the embeddings on
their way into the backbone, and no parameter gets a gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from attnpo.models.backbone import eval_mode
from attnpo.models.logps import compute_logits
from attnpo.models.scored import ScoredLM
from attnpo.schema import InputGradient, ModelInputs, RowGroup, UserError

Output = TypeVar("Output")


def input_gradient(policy: ScoredLM, rows: RowGroup) -> InputGradient:
    """Returns the L1 norm of ``d (largest next-token logit of the row's last token) / d (input embedding)``, per token.

    This is TI-DPO's importance (latent-lm/TIDPO, ``gradient_attribution.py``): the policy runs in eval mode, and rows
    are summed before the backward pass. The result is float32 (float64 for float64 models) and detached; no parameter
    gets a gradient. With sharded weights every rank must call this function.

    Raises:
        UserError: rows are not right-padded, or the model's embeddings cannot be captured.
    """
    prompts = prompt_lengths(rows)
    # Validation may run in inference mode, whose tensors cannot be saved for a backward; clones can.
    with torch.inference_mode(False), torch.enable_grad(), _without_dropout(policy):
        target, embedded = _last_logits(policy, _clone_inputs(rows))
        (gradient,) = torch.autograd.grad(target.max(-1).values.sum(), [embedded])
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return _split_prompt_response(gradient.to(wide).abs().sum(-1), prompts, rows)


@contextmanager
def _without_dropout(policy: ScoredLM) -> Iterator[None]:
    """Disables dropout inside the context (eval mode), but keeps gradient checkpointing in layers without dropout."""
    with eval_mode(policy):
        layers = [
            layer
            for layer in policy.modules()
            if getattr(layer, "gradient_checkpointing", False) and not layer.training and not _has_dropout(layer)
        ]
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in layers:
                layer.training = False


def _has_dropout(layer: nn.Module) -> bool:
    """Returns whether a layer applies dropout in training mode, through a module or a rate attribute."""
    held = any(isinstance(module, nn.Dropout) and module.p > 0 for module in layer.modules())
    return held or any("dropout" in name and bool(value) for name, value in vars(layer).items())


def prompt_lengths(rows: RowGroup) -> Int[Tensor, " rows"]:
    """Returns each row's number of prompt tokens; raises UserError unless the rows have the padded layout."""
    if rows.inputs is None:
        raise ValueError("the rows have no model inputs")
    inputs, mask = rows.inputs, rows.inputs.attention_mask
    count, width = len(rows.response_mask), inputs.input_ids.shape[1]
    refusal = UserError(
        "weights=gradient and TI-DPO's anchors need the padded layout (one right-padded row of prompt and response for "
        f"each of the {count} responses), but the model inputs of shape {tuple(inputs.input_ids.shape)} have a "
        "different layout: set layout=padded, or choose another objective"
    )
    if inputs.segments is not None or mask is None or mask.dim() != 2 or inputs.input_ids.shape[0] != count:
        raise refusal
    prompts = mask.sum(-1) - rows.response_mask.sum(-1)
    places = torch.arange(rows.response_mask.shape[1], device=mask.device)
    starts = torch.arange(count, device=mask.device) * width + prompts - 1
    expected = torch.where(rows.response_mask, starts[:, None] + places, inputs.predict_index)
    padded_right = (mask[:, 1:] <= mask[:, :-1]).all()
    if not bool(padded_right & (inputs.predict_index == expected).all() & (prompts > 0).all()):
        raise refusal
    return prompts


def _last_logits(policy: ScoredLM, inputs: ModelInputs) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, "..."]]:
    """Returns the next-token logits at each row's last token, and the rows' input embeddings as a leaf tensor."""
    assert inputs.attention_mask is not None
    count, width = inputs.input_ids.shape
    last = torch.arange(count, device=inputs.input_ids.device) * width + inputs.attention_mask.sum(-1) - 1
    one = torch.zeros(count, 1, dtype=torch.long, device=last.device)
    embeddings: list[Tensor] = []
    whole: list[Tensor] = []

    def detach_embeddings(made: Tensor) -> Tensor:
        """Detaches the embeddings from the embedding table to stop the gradient here."""
        embeddings.append(made.detach().requires_grad_())
        return embeddings[-1]

    def keep(made: ModelOutput) -> None:
        whole.append(made["logits"])

    with _hook_output(_embedding_module(policy), detach_embeddings), _hook_output(policy.model, keep):
        at_last = replace(inputs, predict_index=last[:, None], scored=None)
        hidden = policy(at_last, one, one == 0, frozenset({"hidden"})).hidden
    if len(embeddings) != 1 or embeddings[0].shape[:2] != inputs.input_ids.shape:
        raise UserError(
            f"{type(policy.model).__name__} looked up its input embeddings {len(embeddings)} times in one forward pass "
            "instead of once for all tokens, which weights=gradient does not support: choose another weight source"
        )
    if whole:  # the full model was called, because backbone and head do not reproduce its logits
        return whole[0].flatten(0, 1).index_select(0, last), embeddings[0]
    return compute_logits(hidden[:, 0], policy.head()), embeddings[0]


def _embedding_module(policy: ScoredLM) -> nn.Module:
    try:
        return policy.model.get_input_embeddings()
    except (AttributeError, NotImplementedError) as error:
        raise UserError(
            f"{type(policy.model).__name__} does not expose its input embeddings, which weights=gradient "
            "needs: choose another weight source"
        ) from error


@contextmanager
def _hook_output(module: nn.Module, hook: Callable[[Output], Tensor | None]) -> Iterator[None]:
    """Lets ``hook`` replace each output of ``module`` inside the context, if gradients are enabled."""
    handle = module.register_forward_hook(lambda _, __, made: hook(made) if torch.is_grad_enabled() else None)
    try:
        yield
    finally:
        handle.remove()


def _clone_inputs(rows: RowGroup) -> ModelInputs:
    assert rows.inputs is not None and rows.inputs.attention_mask is not None
    return replace(
        rows.inputs,
        input_ids=rows.inputs.input_ids.clone(),
        position_ids=rows.inputs.position_ids.clone(),
        attention_mask=rows.inputs.attention_mask.clone(),
    )


def _split_prompt_response(
    scores: Float[Tensor, "rows T"], prompts: Int[Tensor, " rows"], rows: RowGroup
) -> InputGradient:
    """Splits each row's token scores into the scores of the response tokens and the sum over the prompt tokens."""
    width = scores.shape[1]
    places = prompts[:, None] + torch.arange(rows.response_mask.shape[1], device=scores.device)
    response = scores.gather(1, places.clamp(max=width - 1))
    before = torch.arange(width, device=scores.device) < prompts[:, None]
    return InputGradient(
        response=torch.where(rows.response_mask, response, torch.zeros_like(response)),
        prompt=torch.where(before, scores, torch.zeros_like(scores)).sum(-1),
        prompt_tokens=prompts,
    )
