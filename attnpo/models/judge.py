"""A causal LM as judge: attention rows of the verdict position, rollout and verdict, in one forward per batch.

Implements ``attnpo.schema.JudgeModel``. Right-padded batches of similar lengths under a token budget, no attention
mask (a causal model never looks to the right), no vocabulary head but at the verdict position, and no work above the
deepest layer that is asked for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnpo.models.attention_tap import KERNELS, Enough, Probe, tapped
from attnpo.models.logps import project
from attnpo.models.parts import Parts, eval_mode, find_parts, parts_agree, require_causal_lm
from attnpo.schema import JudgeReading, UserError

KERNEL = "sdpa"
"""The attention kernel family a judge runs with unless told otherwise; part of its fingerprint."""


class CausalJudge:
    """Reads attention and verdicts from a Hugging Face causal LM.

    ``token_budget``: tokens (padding included) per forward. ``kernel``: "sdpa" or "blocks" (float32 softmax in blocks
    of queries, for comparison). ``progress``: called after each batch with (prompts done, prompts in all). ``weights``:
    what identifies the model's weights (``attnpo.models.loading.weights_fingerprint``); it enters the fingerprint.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        token_budget: int = 16384,
        kernel: str = KERNEL,
        progress: Callable[[int, int], None] | None = None,
        weights: Mapping[str, Any] | None = None,
    ) -> None:
        if kernel not in KERNELS:
            raise UserError(f"unknown attention kernel {kernel!r} for the judge; one of {', '.join(KERNELS)}")
        if token_budget < 1:
            raise UserError(f"the judge's token budget must be positive, got {token_budget}")
        self.model = require_causal_lm(model)
        self.token_budget = token_budget
        self.kernel = kernel
        self.progress = progress
        self.weights = dict(weights or {})
        self._split: bool | None = None

    @property
    def num_layers(self) -> int:
        """Depth of the model; layers are counted 1..num_layers."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    def fingerprint(self) -> dict[str, Any]:
        """Every property of the model that changes a number.

        The token budget is left out: it changes rounding only (rows by less than 1e-5 in float32).
        """
        return {"weights": self.weights, "dtype": str(self.model.dtype).removeprefix("torch."), "kernel": self.kernel}

    def read(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        layers: Sequence[int],
        per_head: bool = False,
        rollout: bool = False,
        verdict: bool = True,
        label_ids: tuple[int, int] | None = None,
    ) -> list[JudgeReading]:
        """Readings of token-id prompts in their order, float32 (float64 for a float64 model) on the CPU.

        ``layers`` are 1-based and give the rows in the order asked. ``verdict`` runs the full depth and reads the arg
        max token and, when ``label_ids`` are given, their two logits; without it (and without rollout) the forward
        stops in the deepest layer asked. Raises ``UserError`` for a layer out of range, an empty prompt, and
        ``per_head`` of layers that differ in their number of heads.
        """
        self._check(prompts, layers)
        readings: dict[int, JudgeReading] = {}
        wanted = [layer - 1 for layer in layers]
        backbone: PreTrainedModel = self.model.get_decoder()  # type: ignore[no-untyped-call]
        with torch.inference_mode(), eval_mode(self.model):
            parts = self._parts() if verdict else None
            with tapped(backbone, self.kernel):
                for batch in _batches(prompts, self.token_budget):
                    ids, last = _right_padded([prompts[index] for index in batch], self.model.device)
                    probe = Probe(
                        last, wanted, depth=self.num_layers, per_head=per_head, rollout=rollout, stop=not verdict
                    )
                    logits = self._run(backbone, parts, ids, probe, verdict)
                    found = _readings(probe, wanted, logits, label_ids, [len(prompts[index]) for index in batch])
                    readings.update(zip(batch, found, strict=True))
                    if self.progress is not None:
                        self.progress(len(readings), len(prompts))
        return [readings[index] for index in range(len(prompts))]

    def _check(self, prompts: Sequence[Sequence[int]], layers: Sequence[int]) -> None:
        outside = [layer for layer in layers if not 1 <= layer <= self.num_layers]
        if outside:
            raise UserError(
                f"layer {outside[0]} is not in 1..{self.num_layers} of this judge (1 = first); set weights.layer to "
                "one of these, to 'last' or to a fraction such as '1/2'"
            )
        empty = [index for index, prompt in enumerate(prompts) if len(prompt) == 0]
        if empty:
            raise UserError(f"judge prompt {empty[0]} has no token; check judge.template_file and the chat template")

    def _parts(self) -> Parts | None:
        if self._split is None:
            self._split = parts_agree(self.model)
        return find_parts(self.model) if self._split else None

    def _run(self, backbone: nn.Module, parts: Parts | None, ids: Tensor, probe: Probe, verdict: bool) -> Tensor | None:
        """Logits [batch vocab] of the last positions when the verdict is wanted; fills the probe."""
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False, "attention_probe": probe}
        batch = torch.arange(ids.shape[0], device=ids.device)
        if not verdict:
            if probe.wanted or probe.keep:
                with suppress(Enough):
                    backbone(**inputs)
            return None
        if parts is None:
            positions, inverse = torch.unique(probe.last, return_inverse=True)
            logits = self.model(**inputs, logits_to_keep=positions).logits
            return logits[batch, inverse]  # type: ignore[no-any-return]
        hidden = backbone(**inputs).last_hidden_state
        return project(hidden[batch, probe.last], parts.projection())


def _batches(prompts: Sequence[Sequence[int]], budget: int) -> Iterator[list[int]]:
    """Indices in batches of similar length, longest first, padded size within the budget (one prompt at least)."""
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    start = 0
    while start < len(order):
        count = max(1, budget // len(prompts[order[start]]))
        yield order[start : start + count]
        start += count


def _right_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [batch T] and last positions [batch]. Padding is id 0; nothing reads it."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[*prompt, *([0] * (width - len(prompt)))] for prompt in prompts], dtype=torch.long)
    last = torch.tensor([len(prompt) - 1 for prompt in prompts], dtype=torch.long)
    return ids.to(device), last.to(device)


def _readings(
    probe: Probe,
    wanted: Sequence[int],
    logits: Tensor | None,
    label_ids: tuple[int, int] | None,
    lengths: Sequence[int],
) -> list[JudgeReading]:
    probe.require(probe.rows, wanted)
    _require_same_heads({layer + 1: probe.rows[layer] for layer in wanted})
    rolled = probe.rollout().cpu() if probe.keep else None
    shape = (len(lengths), 0, max(lengths))
    rows = torch.stack([probe.rows[layer] for layer in wanted], 1).cpu() if wanted else torch.zeros(shape)
    tokens = None if logits is None else logits.argmax(-1).cpu()
    labels = None if logits is None or label_ids is None else logits[:, list(label_ids)].cpu()
    return [
        JudgeReading(
            rows=rows[index, ..., :length].clone(),
            rollout=None if rolled is None else rolled[index, :length].clone(),
            verdict_logits=None if labels is None else labels[index].clone(),
            verdict_token=None if tokens is None else int(tokens[index]),
        )
        for index, length in enumerate(lengths)
    ]


def _require_same_heads(rows: Mapping[int, Tensor]) -> None:
    """Nothing; UserError for rows per head, by layer, when the layers differ in their number of heads."""
    first: dict[int, int] = {}
    for layer, found in rows.items():
        first.setdefault(found.shape[1], layer)
    if len(first) > 1:
        (one, here), (two, there) = list(first.items())[:2]
        raise UserError(
            f"weights.heads: layer {here} of this judge has {one} query heads and layer {there} has {two}, so a head "
            "has no fixed meaning; set weights.heads=[] (the mean over the heads of each layer) or take another judge"
        )
