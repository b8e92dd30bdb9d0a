"""The scored language model: one callable from model inputs to per-token statistics in response space.

Backbone, vocabulary head and chunk loop run inside one ``forward``, so sharding hooks, adapters, autocast and
activation checkpointing hold for all three. Only hidden states that predict a scored token meet the head.
"""

import logging
from collections.abc import Collection, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attnpo.models.backbone import (
    find_parts,
    first_position,
    is_materialised,
    parts_agree,
    require_causal_lm,
)
from attnpo.models.logps import (
    STATISTICS,
    Head,
    project,
    statistics_of_logits,
    token_statistics,
)
from attnpo.models.packed_attention import PLAN, Plan, attend_in_segments, boundaries
from attnpo.models.router import CHOSEN, RECORD, ROUTER, loads
from attnpo.schema import ModelInputs, TokenStats, UserError

logger = logging.getLogger(__name__)

KNOWN_REQUESTS = frozenset({"logps", "hidden", ROUTER} | STATISTICS.keys())


class ScoredLM(nn.Module):
    """A Hugging Face causal LM whose forward gives ``TokenStats``.

    ``chunk`` is the number of tokens sent through the vocabulary head at once; it bounds memory and changes no
    number. At construction (or at the first forward of a sharded or meta model) four tokens are run to see that
    backbone and head give the model's own logits (if not, the whole model is called and its logits are used) and from
    where it counts positions.
    """

    def __init__(self, model: nn.Module, *, chunk: int = 1024) -> None:
        super().__init__()
        self.model = require_causal_lm(model)
        self.chunk = chunk
        self._split: bool | None = None
        self._first = 0
        if is_materialised(model):
            self._try()

    def _try(self) -> None:
        """Finds out once how logits follow from the parts and where positions begin."""
        self._split, self._first = parts_agree(self.model), first_position(self.model)

    def head(self) -> Head:
        """Returns the vocabulary head, to be given to another model's ``other``.

        Raises ``UserError`` when the model has no plain linear head, or logits that do not follow from it alone.
        """
        parts = None if self._split is False else find_parts(self.model)
        if parts is None:
            raise UserError(
                f"{type(self.model).__name__}: its logits are not those of a plain linear vocabulary head, so there is "
                "nothing to compare with (joint statistics, as in tdpo1, tdpo2 and tidpo); take another model or "
                "objective"
            )
        return parts.projection()

    def forward(
        self,
        inputs: ModelInputs,
        response_ids: Int[Tensor, "rows R"],
        response_mask: Bool[Tensor, "rows R"],
        requests: Collection[str] = frozenset({"logps"}),
        other: tuple[Float[Tensor, "rows R e"], Head] | None = None,
    ) -> TokenStats:
        """Statistics of every response token; positions under a false mask hold exactly 0 and pass no gradient.

        ``requests``: "logps" (always given), "hidden" (the final hidden states that predict the tokens),
        "vocab:entropy", "vocab:collision", "vocab:top_prob", and with ``other`` (the second model's hidden states in
        response space and its head) "joint:kl_ref_policy", "joint:kl_policy_ref", and "router" (the loads of the
        experts of a mixture). Gradients reach this model only.
        Inputs with segments set the model's attention, for good, to the one that follows them. Raises ``UserError``
        for a request that is not known or lacks ``other``, and for segments that the model cannot follow.
        """
        vocab, joint = _parse(requests, other is not None)
        keep = torch.where(response_mask) if inputs.scored is None else inputs.scored.unbind(1)
        labels, index = response_ids[keep], inputs.predict_index[keep]
        second = None if other is None else (other[0][keep], other[1])
        if self._split is None:
            self._try()
        parts = find_parts(self.model) if self._split else None
        reads = {**self._reads(inputs), **(RECORD if ROUTER in requests else {})}
        if parts is None:
            routers, hidden, values = self._from_logits(
                inputs.input_ids, reads, index, labels, vocab, joint, second, "hidden" in requests
            )
        else:
            output = parts.backbone(input_ids=inputs.input_ids, use_cache=False, **reads)
            routers = output.get("router_logits", ())
            hidden = output.last_hidden_state.flatten(0, 1).index_select(0, index)
            values = token_statistics(
                hidden, parts.projection(), labels, vocab=vocab, joint=joint, other=second, chunk=self.chunk
            )
        shape = response_mask.shape
        spread = {name: _spread(value, keep, shape) for name, value in values.items()}
        return TokenStats(
            logps=spread["logps"],
            hidden=_spread(hidden, keep, shape) if hidden is not None and "hidden" in requests else None,
            vocab={name: spread[f"vocab:{name}"] for name in vocab},
            joint={name: spread[f"joint:{name}"] for name in joint},
            routing=loads(routers, inputs, self._chosen()) if ROUTER in requests else None,
        )

    def _chosen(self) -> int:
        """Returns how many experts each token is given to."""
        return int(getattr(self.model.config.get_text_config(), CHOSEN))

    def _reads(self, inputs: ModelInputs) -> dict[str, object]:
        """Mask, positions and plan of segments for the backbone; no mask for right-padded rows.

        Under causal attention a token never sees what stands to its right, so right padding needs no mask, and without
        one the attention kernel takes its causal path instead of a batch x T x T mask. A row of segments keeps its mask
        of ones: without any, transformers would cut the row itself where positions restart. Beside the plan it has its
        sequences' boundaries, for layers that are no attention.
        """
        mask, places = inputs.attention_mask, inputs.position_ids
        positions = {"position_ids": places + self._first if self._first else places}
        if inputs.segments is not None:
            attend_in_segments(self.model)
            device = inputs.input_ids.device
            plan = Plan.of(inputs.segments, inputs.input_ids.shape[1], device)
            mask = torch.ones_like(inputs.input_ids)
            return {"attention_mask": mask, PLAN: plan, **boundaries(inputs.segments, device), **positions}
        if mask is not None and mask.dim() == 2 and bool((mask[:, 1:] <= mask[:, :-1]).all()):
            mask = None
        return {"attention_mask": mask, **positions}

    def _from_logits(
        self,
        input_ids: Tensor,
        reads: dict[str, object],
        index: Tensor,
        labels: Tensor,
        vocab: list[str],
        joint: list[str],
        second: tuple[Tensor, Head] | None,
        want_hidden: bool,
    ) -> tuple[Sequence[Tensor], Tensor | None, dict[str, Tensor]]:
        output = self.model(input_ids=input_ids, use_cache=False, output_hidden_states=want_hidden, **reads)
        logits = output.logits.flatten(0, 1).index_select(0, index)
        picked = output.hidden_states[-1].flatten(0, 1).index_select(0, index) if want_hidden else None
        other = None if second is None or not joint else project(*second)
        return (
            output.get("router_logits", ()),
            picked,
            statistics_of_logits(logits, labels, vocab=vocab, joint=joint, other=other),
        )


def _parse(requests: Collection[str], has_other: bool) -> tuple[list[str], list[str]]:
    unknown = sorted(set(requests) - KNOWN_REQUESTS)
    if unknown:
        raise UserError(f"unknown token statistic {unknown[0]!r}; known: {', '.join(sorted(KNOWN_REQUESTS))}")
    vocab = sorted(name.removeprefix("vocab:") for name in requests if name.startswith("vocab:"))
    joint = sorted(name.removeprefix("joint:") for name in requests if name.startswith("joint:"))
    if joint and not has_other:
        raise UserError(f"joint:{joint[0]} compares two models: pass other=(hidden, head) of the second one")
    return vocab, joint


def _spread(values: Tensor, keep: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
    """Values [N ...] of the kept (row, position) put into zeros of response space [rows R ...]; never a view."""
    return values.new_zeros((*shape, *values.shape[1:])).index_put(keep, values)
