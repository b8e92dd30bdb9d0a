"""Judge based on a causal LM: reads attention rows, rollout and verdict of a batch in one forward pass.

Implements ``judge.base.JudgeModel``. Prompts are packed into one row without padding, and common prefixes are stored
only once. The last layer and the vocabulary head run only at the verdict positions, and nothing runs above the deepest
requested layer. A model that does not support packed rows gets right-padded batches of prompts of similar length, which
give the same results more slowly. Support is tested once per model.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnpo.judge.attention import (
    CAUSAL,
    KERNELS,
    MAPS,
    PROBE,
    AmbiguousAttention,
    AttentionProbe,
    StopForward,
    check_attention_rows,
    read_eager_maps,
    tap_attention,
    trim_last_layer,
)
from attnpo.judge.base import JudgeReading
from attnpo.models.backbone import (
    ModelParts,
    eval_mode,
    final_hidden_states,
    find_parts,
    has_exact_parts,
    probe_bound,
    require_causal_lm,
    vocabulary_size,
)
from attnpo.models.description import ModelDescription, attending_layers, backbone_of, max_over_layers
from attnpo.models.generate import batch_longest_first
from attnpo.models.logps import compute_logits
from attnpo.models.prompt_rows import pack_prompts, row_batches
from attnpo.models.trial import EXACT, BlockRecorder, is_different, make_small_copy, probe_prompts, right_pad_prompts
from attnpo.schema import UserError
from attnpo.system.files import format_bytes

log = logging.getLogger(__name__)

ROW_BYTES = 16 << 20
"""Maximum bytes of a row's activations on a CPU; larger rows overflow its caches and need newly zeroed pages."""

KERNEL = "sdpa"
"""Default attention kernel family of a judge; part of its fingerprint."""


def kernel_for(found: ModelDescription) -> str:
    """Returns the kernel family for a model class: sdpa, maps, or blocks if torch's fused kernel is unsuitable."""
    return MAPS if found.mapped else KERNEL if found.attention == KERNEL else "blocks"


def check_request(
    model: str, name: str, sequences: Sequence[Sequence[int]], layers: Sequence[int], num_layers: int
) -> None:
    """Raises UserError if ``model`` lacks one of the layers, or if a sequence has no tokens."""
    outside = [layer for layer in layers if not 1 <= layer <= num_layers]
    if outside:
        raise UserError(
            f"layer {outside[0]} is out of range: this {model} has layers 1..{num_layers} (1 = first); set "
            "weights.layer to one of these, to 'last' or to a fraction such as '1/2'"
        )
    empty = [index for index, ids in enumerate(sequences) if len(ids) == 0]
    if empty:
        raise UserError(f"{name} {empty[0]} has no tokens; check the prompt wording and the chat template")


class CausalJudge:
    """Reads attention and verdicts from a Hugging Face causal LM.

    ``token_budget``: maximum number of tokens per forward pass (including padding; common prefixes count once). On a
    CPU, wide models get shorter rows, which is faster there. ``kernel``: "sdpa", "blocks" (float32 softmax in blocks of
    queries, for comparison) or "maps" (eager attention maps, one prompt at a time). "maps" is also the fallback if the
    other two would change the model's logits.
    """

    _words: ClassVar[tuple[str, str]] = "judge", "judge prompt"

    def __init__(self, model: nn.Module, *, token_budget: int = 16384, kernel: str = KERNEL) -> None:
        if kernel not in KERNELS:
            raise UserError(f"unknown attention kernel {kernel!r} for the judge; choose one of {', '.join(KERNELS)}")
        if token_budget < 1:
            raise UserError(f"the judge's token budget must be positive, got {token_budget}")
        self.model = require_causal_lm(model)
        self.token_budget = token_budget
        self.kernel = kernel
        self._split: bool | None = None
        self._follows: bool | None = None
        self._readable = False

    @property
    def num_layers(self) -> int:
        """Returns the number of layers, numbered from 1. Raises UserError if the config does not state it."""
        depth = getattr(self.model.config.get_text_config(), "num_hidden_layers", None)
        if not isinstance(depth, int):
            raise UserError(
                f"judge: the config of {type(self.model).__name__} has no num_hidden_layers, so its layers cannot be "
                "numbered; set judge.path to another model"
            )
        return depth

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
        """Reads prompts given as token ids; returns one reading per prompt, in order, on the CPU, in float32 or higher.

        ``layers`` are 1-based and determine the order of the rows. With ``verdict``, the model runs at full depth and
        the argmax token is read. If ``label_ids`` are given, their two logits and ``verdict_logps`` are read as well.
        Without ``verdict`` and rollout, the forward pass stops in the deepest requested layer. Raises ``UserError`` if
        a layer is out of range, a prompt is empty, ``per_head`` is set and layers differ in their number of heads, or
        the model's attention cannot be read without changing its output.
        """
        check_request(*self._words, prompts, layers, self.num_layers)
        if prompts:
            self._check_readable()
        readings: dict[int, JudgeReading] = {}
        asked = partial(
            self._read_batch, layers=layers, per_head=per_head, rollout=rollout, verdict=verdict, label_ids=label_ids
        )
        with torch.inference_mode(), eval_mode(self.model), tap_attention(self._backbone, self.kernel):
            shared = len(prompts) > 1 and self.kernel != MAPS and self._can_share_rows()
            most = 0 if self.kernel == MAPS and (layers or rollout) else self.token_budget
            padded = batch_longest_first([len(prompt) for prompt in prompts], lambda length: most // length)
            for batch in row_batches(prompts, self._row_token_budget(prompts)) if shared else padded:
                answers = asked([prompts[index] for index in batch], shared=shared)
                readings.update(zip(batch, answers, strict=True))
        return [readings[index] for index in range(len(prompts))]

    def _row_token_budget(self, prompts: Sequence[Sequence[int]]) -> int:
        """Returns the maximum number of tokens per row: the token budget or, on a CPU, less but enough for any pair."""
        if self.model.device.type != "cpu":
            return self.token_budget
        config = self.model.config.get_text_config()
        inner = max_over_layers(config, "intermediate_size") or 4 * (max_over_layers(config, "hidden_size") or 1)
        near = ROW_BYTES // (inner * self.model.dtype.itemsize)
        return min(self.token_budget, max(near, 2 * max(map(len, prompts), default=0)))

    @property
    def _backbone(self) -> PreTrainedModel:
        return backbone_of(self.model)

    def _exact_parts(self) -> ModelParts | None:
        if self._split is None:
            self._split = has_exact_parts(self.model)
        return find_parts(self.model) if self._split else None

    def _read_batch(
        self,
        prompts: Sequence[Sequence[int]],
        layers: Sequence[int],
        *,
        per_head: bool,
        rollout: bool,
        verdict: bool,
        label_ids: tuple[int, int] | None,
        shared: bool,
    ) -> list[JudgeReading]:
        """Reads one batch, packed into one row if ``shared``."""
        wanted = [layer - 1 for layer in layers]
        inputs, probe = self._prepare_inputs(
            prompts, wanted, shared, per_head=per_head, rollout=rollout, stop=not verdict
        )
        logits = self._forward(inputs, probe, verdict)
        return make_readings(probe, wanted, logits, label_ids, [len(prompt) for prompt in prompts])

    def _prepare_inputs(
        self,
        prompts: Sequence[Sequence[int]],
        wanted: Sequence[int],
        shared: bool,
        *,
        per_head: bool = False,
        rollout: bool = False,
        stop: bool = False,
    ) -> tuple[dict[str, object], AttentionProbe]:
        """Builds the model's keyword arguments; returns them and the probe they contain."""
        inputs: Mapping[str, object]
        if shared:
            row = pack_prompts(prompts, self.model.device)
            inputs, last, branches = row.inputs(), row.last, row.branches
        else:
            ids, last = right_pad_prompts(prompts, self.model.device)
            inputs, branches = {"input_ids": ids}, None
        probe = AttentionProbe(
            last, wanted, depth=self.num_layers, per_head=per_head, rollout=rollout, stop=stop, branches=branches
        )
        return {**inputs, "use_cache": False, PROBE: probe}, probe

    def _forward(self, inputs: dict[str, object], probe: AttentionProbe, verdict: bool) -> Tensor | None:
        """Runs the model and fills the probe; returns the last positions' logits [batch vocab] if requested."""
        if self.kernel == MAPS:
            inputs = {name: value for name, value in inputs.items() if name != PROBE}
            if probe.wanted or probe.keep:
                return read_eager_maps(self.model, self._exact_parts() if verdict else None, inputs, probe, verdict)
        if not verdict:
            if probe.wanted or probe.keep:
                with suppress(StopForward):
                    self._backbone(**inputs)
            return None
        parts = self._exact_parts()
        if probe.branches is not None:
            with self._trim_to_last_positions():
                if parts is None:
                    return self.model(**inputs).logits[0]  # type: ignore[no-any-return]
                return compute_logits(self._backbone(**inputs).last_hidden_state[0], parts.projection())
        batch = torch.arange(len(probe.last), device=probe.last.device)
        if parts is None:
            positions, inverse = torch.unique(probe.last, return_inverse=True)
            logits = self.model(**inputs, logits_to_keep=positions).logits
            return logits[batch, inverse]  # type: ignore[no-any-return]
        hidden = self._backbone(**inputs).last_hidden_state
        return compute_logits(hidden[batch, probe.last], parts.projection())

    def _trim_to_last_positions(self) -> AbstractContextManager[None]:
        stacks = [module for module in self._backbone.modules() if isinstance(module, nn.ModuleList)]
        return trim_last_layer(next(stack[-1] for stack in stacks if len(stack) == self.num_layers))

    def _can_share_rows(self) -> bool:
        """Returns whether packing several prompts into a row gives the same results as a padded batch; tested once."""
        if self._follows is None:
            reason = self._find_row_problem()
            self._follows = reason is None
            if reason is not None:
                log.info("judge: %s; prompts are padded instead, which gives the same results more slowly", reason)
        return self._follows

    @torch.inference_mode()
    def _check_readable(self) -> None:
        """Raises ``UserError`` if reading the attention changes the model's logits; tested once."""
        if self._readable:
            return
        prompts, at = probe_prompts(vocabulary_size(self.model)), BlockRecorder(self._backbone)
        ids, last = right_pad_prompts(prompts, self.model.device)
        with eval_mode(self.model), at.record():
            rows = torch.arange(len(prompts), device=last.device)
            expected = self.model(input_ids=ids, use_cache=False).logits[rows, last]
            problem = "none of its layers uses transformers' AttentionInterface"
            if self.kernel != MAPS:
                problem = self._find_unreadable_attention(prompts, expected, at) or ""
            if problem:
                self._switch_to_maps(prompts, problem)
        self._readable = True

    def _find_unreadable_attention(
        self, prompts: Sequence[Sequence[int]], expected: Tensor, at: BlockRecorder
    ) -> str | None:
        """Returns the reason why the attention cannot be read, including the layer; None if it can be read."""
        untapped = at.outputs.copy()
        try:
            with tap_attention(self._backbone, self.kernel):
                inputs, probe = self._prepare_inputs(prompts, range(self.num_layers), False)
                logits = self._forward(inputs, probe, verdict=True)
        except (torch.OutOfMemoryError, AmbiguousAttention):
            raise
        except Exception as error:  # noqa: BLE001  # code of any model
            return f"the attention of layer {at.number} cannot be read ({_describe_error(error)})"
        assert logits is not None
        if is_different(logits, expected):
            changed = (number for number, states in untapped.items() if is_different(at.outputs[number], states))
            layer, gap = next(changed, at.number), float((logits - expected).abs().max())
            return f"reading the attention of layer {layer} changes the logits (by {gap:.3g})"
        silent = [layer for layer in attending_layers(self._backbone) if layer - 1 not in probe.rows]
        return f"layer {silent[0]} does not forward its keyword arguments" if silent else None

    def _switch_to_maps(self, prompts: Sequence[Sequence[int]], problem: str) -> None:
        """Switches to eager attention maps and logs this; raises ``UserError`` if they do not work either."""
        kind, before = type(self.model).__name__, self.kernel
        self.kernel = MAPS
        try:
            for prompt in prompts:
                inputs, probe = self._prepare_inputs([prompt], range(self.num_layers), False, per_head=True)
                ids = inputs["input_ids"]
                expected = self.model(input_ids=ids, use_cache=False).logits[:, -1]
                with tap_attention(self._backbone, MAPS):
                    logits = self._forward(inputs, probe, verdict=True)
                if logits is None or is_different(logits, expected):
                    raise UserError("they change the model's logits: load the model with attn_implementation=eager")
                check_attention_rows(probe, attending_layers(self._backbone))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.kernel = before
            raise UserError(
                f"judge: {kind}: {problem}, and the maps of eager attention cannot be used either "
                f"({_describe_error(error)}): set judge.path to another model"
            ) from error
        square = sum(row.shape[1] for row in probe.rows.values()) * self.model.dtype.itemsize
        log.info(
            "judge: %s: %s; the maps of eager attention are read instead, one prompt at a time, which gives the same "
            "results more slowly and needs %d * T * T bytes of memory for a prompt of T tokens (%s if T is 2048)",
            kind,
            problem,
            square,
            format_bytes(square * 2048**2),
        )

    def _find_row_problem(self) -> str | None:
        """Returns the reason why rows of several prompts do not match a padded batch; None if they do."""
        kind = type(self.model).__name__
        prompts = probe_prompts(vocabulary_size(self.model))
        expected = self._forward(*self._prepare_inputs(prompts, (), False), verdict=True)
        assert expected is not None
        try:
            logits = self._forward(*self._prepare_inputs(prompts, (), True), verdict=True)
        except Exception as error:  # noqa: BLE001  # code of any model; whatever it raises, it cannot take such rows
            return f"{kind} cannot process rows of several prompts ({type(error).__name__}: {error})"
        if logits is None or logits.shape != expected.shape:
            return f"{kind} cannot run its last layer on a subset of the positions"
        if self.model.dtype in EXACT:
            gap, bound = float((logits - expected).abs().max()), probe_bound(expected)
            if not gap <= bound:  # NaN is no match either
                return f"{kind} gives different logits in rows of several prompts (by {gap:.3g}, tolerance {bound:.3g})"
            return None
        # In low precision, bits show whether prompts of a row interact; a few layers in float32 show the rest.
        if self._prompts_interact(prompts, logits, True) and not self._prompts_interact(prompts, expected, False):
            return f"{kind} changes its verdict on a prompt when other prompts share its row"
        try:
            small = CausalJudge(make_small_copy(self.model, self.model.device, torch.float32), kernel=self.kernel)
        except Exception as error:  # noqa: BLE001  # the config of any model
            return f"{kind} cannot be tested in float32 ({type(error).__name__}: {error})"
        with tap_attention(small._backbone, self.kernel):
            return small._find_row_problem()

    def _prompts_interact(self, prompts: Sequence[Sequence[int]], logits: Tensor, shared: bool) -> bool:
        """Returns whether other prompts' tokens change a verdict bitwise; False if verdicts are not reproducible."""
        row = cast(Tensor, self._prepare_inputs(prompts, (), shared)[0]["input_ids"])
        for index in range(len(prompts)):
            inputs, probe = self._prepare_inputs(probe_prompts(vocabulary_size(self.model), index), (), shared)
            changed = self._forward(inputs, probe, verdict=True)
            assert changed is not None
            alike = cast(Tensor, inputs["input_ids"]).shape == row.shape  # if the common prefixes have the same length
            if alike and not torch.equal(changed[index], logits[index]):
                again = self._forward(*self._prepare_inputs(prompts, (), shared), verdict=True)
                return again is not None and torch.equal(again, logits)
        return False


def _describe_error(error: Exception) -> str:
    """Describes an exception raised by a model's code."""
    words = " ".join(str(error).split())[:200]
    if isinstance(error, UserError):
        return words
    if type(CAUSAL).__name__ in words:
        return "the model's own code operates on the mask"
    return f"{type(error).__name__}: {words}"


def make_readings(
    probe: AttentionProbe,
    wanted: Sequence[int],
    logits: Tensor | None,
    label_ids: tuple[int, int] | None,
    lengths: Sequence[int],
) -> list[JudgeReading]:
    """Builds readings from a filled probe and the logits [batch vocab] of the last positions.

    ``lengths``: number of tokens in each prompt. ``wanted``: 0-based layers. Raises UserError if one of them produced
    no attention, or if layers differ in their number of heads.
    """
    probe.check_layers_read(probe.rows, wanted)
    _check_same_heads({layer + 1: probe.rows[layer] for layer in wanted})
    rolled = probe.compute_rollout().cpu() if probe.keep else None
    shape = (len(lengths), 0, max(lengths))
    rows = torch.stack([probe.rows[layer] for layer in wanted], 1).cpu() if wanted else torch.zeros(shape)
    tokens = None if logits is None else logits.argmax(-1).cpu()
    labels = None if logits is None or label_ids is None else logits[:, list(label_ids)].cpu()
    logps = None if logits is None or labels is None else _verdict_log_probs(labels, logits)
    return [
        JudgeReading(
            rows=rows[index, ..., :length].clone(),
            rollout=None if rolled is None else rolled[index, :length].clone(),
            verdict_logits=None if labels is None else labels[index].clone(),
            verdict_token=None if tokens is None else int(tokens[index]),
            verdict_logps=None if logps is None else logps[index].clone(),
        )
        for index, length in enumerate(lengths)
    ]


def _verdict_log_probs(labels: Tensor, logits: Tensor) -> Tensor:
    """Returns log-probabilities [batch 3] of both labels and the argmax token, from label logits and all logits."""
    return torch.cat([labels, logits.amax(-1, keepdim=True).cpu()], 1) - logits.logsumexp(-1, keepdim=True).cpu()


def _check_same_heads(rows: Mapping[int, Tensor]) -> None:
    """Raises ``UserError`` if the layers in ``rows`` (layer -> rows per head) differ in their number of heads."""
    first: dict[int, int] = {}
    for layer, row in rows.items():
        first.setdefault(row.shape[1], layer)
    if len(first) > 1:
        (one, here), (two, there) = list(first.items())[:2]
        raise UserError(
            f"weights.heads: layer {here} of this judge has {one} query heads and layer {there} has {two}, so a "
            "head index has no fixed meaning; set weights.heads=[] (the mean over a layer's heads) or use another judge"
        )


class RewardModel(CausalJudge):
    """Reads the attention of each conversation's last token from a Hugging Face sequence classification model.

    Args:
        model: the model, with a causal backbone (``load_model(..., reward=True)``).
        token_budget: maximum number of tokens per forward pass, including padding.
        kernel: "sdpa" or "blocks", as for a judge.
    """

    _words = "reward model", "conversation"

    def __init__(self, model: PreTrainedModel, *, token_budget: int = 16384, kernel: str = KERNEL) -> None:
        self.model, self.token_budget, self.kernel = model, token_budget, kernel
        self._follows, self._readable = False, False  # conversations are padded; packed rows are not tested

    @property
    def _backbone(self) -> PreTrainedModel:
        return cast(PreTrainedModel, self.model.base_model)

    @torch.inference_mode()
    def _check_readable(self) -> None:
        if self._readable:
            return
        kind, prompts = type(self.model).__name__, probe_prompts(vocabulary_size(self._backbone))
        ids, last = right_pad_prompts(prompts, self.model.device)
        rows = torch.arange(len(last), device=last.device)
        inputs, probe = self._prepare_inputs(prompts, range(self.num_layers), False)
        with eval_mode(self.model):
            expected = final_hidden_states(self._backbone, ids)[rows, last]
            try:
                with tap_attention(self._backbone, self.kernel):
                    hidden = self._backbone(**inputs).last_hidden_state[rows, last]
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of any model
                raise UserError(
                    f"weights.path: the attention of {kind} cannot be read ({_describe_error(error)}); choose another "
                    "reward model"
                ) from error
        if not probe.rows or is_different(hidden, expected):
            raise UserError(
                f"weights.path: reading the attention of {kind} changes its output, so its attention is not a plain "
                "softmax over the visible keys; choose another reward model"
            )
        self._readable = True
