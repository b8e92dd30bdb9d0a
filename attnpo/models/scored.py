"""Language model whose forward maps model inputs to per-token statistics in response space.

Backbone, vocabulary head and chunk loop run inside one ``forward``, so sharding hooks, adapters, autocast and
activation checkpointing apply to all three. Only hidden states that predict a scored token pass through the head.
"""

import logging
from collections.abc import Collection

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attnpo.models.backbone import (
    find_parts,
    first_position,
    has_exact_parts,
    is_materialised,
    require_causal_lm,
)
from attnpo.models.logps import (
    STATISTICS,
    LMHead,
    compute_logits,
    statistics_from_logits,
    token_statistics,
)
from attnpo.models.packed_attention import PLAN, SegmentPlan, enable_segment_attention, sequence_boundaries
from attnpo.models.router import CHOSEN, RECORD, ROUTER, expert_loads
from attnpo.schema import ModelInputs, TokenStats, UserError

logger = logging.getLogger(__name__)

KNOWN_REQUESTS = frozenset({"logps", "hidden", ROUTER} | STATISTICS.keys())


class ScoredLM(nn.Module):
    """Hugging Face causal LM whose forward returns ``TokenStats``.

    ``chunk``: tokens per pass through the vocabulary head; it affects only memory. A first run on four tokens checks
    that the backbone and head reproduce the model's logits; if not, the model's full logits are used.
    """

    def __init__(self, model: nn.Module, *, chunk: int = 1024) -> None:
        super().__init__()
        self.model = require_causal_lm(model)
        self.chunk = chunk
        self._split: bool | None = None
        self._first = 0
        if is_materialised(model):
            self._probe_model()

    def _probe_model(self) -> None:
        """Checks once whether backbone and head reproduce the logits, and where positions start."""
        self._split, self._first = has_exact_parts(self.model), first_position(self.model)

    def head(self) -> LMHead:
        """Returns the vocabulary head, to pass as ``other`` to another model.

        Raises ``UserError`` if the head is not linear.
        """
        parts = None if self._split is False else find_parts(self.model)
        if parts is None:
            raise UserError(
                f"{type(self.model).__name__}: its logits do not come from a plain linear vocabulary head, so joint "
                "statistics (used by tdpo1, tdpo2 and tidpo) are not available: choose another model or objective"
            )
        return parts.projection()

    def forward(
        self,
        inputs: ModelInputs,
        response_ids: Int[Tensor, "rows R"],
        response_mask: Bool[Tensor, "rows R"],
        requests: Collection[str] = frozenset({"logps"}),
        other: tuple[Float[Tensor, "rows R e"], LMHead] | None = None,
    ) -> TokenStats:
        """Computes statistics of all response tokens; positions outside the mask are 0 and have no gradient.

        ``requests``: "logps" (always returned), "hidden", "router", or names of ``STATISTICS``; joint statistics need
        ``other`` (the second model's hidden states in response space and its head). Inputs with segments permanently
        switch the model to segment attention. Raises ``UserError`` for an unknown request, a missing ``other``, or
        segments that the model does not support.
        """
        vocab, joint = _split_requests(requests, other is not None)
        keep = torch.where(response_mask) if inputs.scored is None else inputs.scored.unbind(1)
        labels, index = response_ids[keep], inputs.predict_index[keep]
        second = None if other is None else (other[0][keep], other[1])
        if self._split is None:
            self._probe_model()
        parts = find_parts(self.model) if self._split else None
        reads = {**self._forward_kwargs(inputs), **(RECORD if ROUTER in requests else {})}
        if parts is None:
            hidden_too = "hidden" in requests
            output = self.model(input_ids=inputs.input_ids, use_cache=False, output_hidden_states=hidden_too, **reads)
            logits = output.logits.flatten(0, 1).index_select(0, index)
            hidden = output.hidden_states[-1].flatten(0, 1).index_select(0, index) if hidden_too else None
            compared = None if second is None or not joint else compute_logits(*second)
            values = statistics_from_logits(logits, labels, vocab=vocab, joint=joint, other=compared)
        else:
            output = parts.backbone(input_ids=inputs.input_ids, use_cache=False, **reads)
            hidden = output.last_hidden_state.flatten(0, 1).index_select(0, index)
            values = token_statistics(
                hidden, parts.projection(), labels, vocab=vocab, joint=joint, other=second, chunk=self.chunk
            )
        routers, config = output.get("router_logits", ()), self.model.config.get_text_config()
        shape = response_mask.shape
        spread = {name: _scatter_rows(value, keep, shape) for name, value in values.items()}
        return TokenStats(
            logps=spread["logps"],
            hidden=_scatter_rows(hidden, keep, shape) if hidden is not None and "hidden" in requests else None,
            vocab={name: spread[f"vocab:{name}"] for name in vocab},
            joint={name: spread[f"joint:{name}"] for name in joint},
            routing=expert_loads(routers, inputs, getattr(config, CHOSEN)) if ROUTER in requests else None,
        )

    def _forward_kwargs(self, inputs: ModelInputs) -> dict[str, object]:
        """Returns mask, positions and segment plan; right-padded rows need no mask, so a causal kernel can be used."""
        mask, places = inputs.attention_mask, inputs.position_ids
        positions = {"position_ids": places + self._first if self._first else places}
        if inputs.segments is not None:
            enable_segment_attention(self.model)
            device = inputs.input_ids.device
            plan = SegmentPlan.from_segments(inputs.segments, inputs.input_ids.shape[1], device)
            mask = torch.ones_like(inputs.input_ids)
            return {"attention_mask": mask, PLAN: plan, **sequence_boundaries(inputs.segments, device), **positions}
        if mask is not None and mask.dim() == 2 and bool((mask[:, 1:] <= mask[:, :-1]).all()):
            mask = None
        return {"attention_mask": mask, **positions}


def _split_requests(requests: Collection[str], has_other: bool) -> tuple[list[str], list[str]]:
    unknown = sorted(set(requests) - KNOWN_REQUESTS)
    if unknown:
        raise UserError(f"unknown token statistic {unknown[0]!r}; choose from {', '.join(sorted(KNOWN_REQUESTS))}")
    vocab = sorted(name.removeprefix("vocab:") for name in requests if name.startswith("vocab:"))
    joint = sorted(name.removeprefix("joint:") for name in requests if name.startswith("joint:"))
    if joint and not has_other:
        raise UserError(f"joint:{joint[0]} compares two models: pass the second one as other=(hidden, head)")
    return vocab, joint


def _scatter_rows(values: Tensor, keep: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
    """Scatters the values [N ...] of the kept positions into a zero tensor [rows R ...] in response space."""
    return values.new_zeros((*shape, *values.shape[1:])).index_put(keep, values)
