"""Layouts: how prompts and responses become model inputs, and where each response token is predicted.

Owns the map from response space (rows x R) to the model's hidden states. Objectives, weights and metrics never see a
prompt, a pad or a packed row: a layout gives ``ModelInputs`` with a ``predict_index``, and that is all the scored
model needs. All layouts give the same numbers up to rounding; which of them a model can take is found by trying.
"""

import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnpo.models.backbone import eval_mode, is_materialised, probe_bound, training_mode, vocabulary
from attnpo.models.packed_attention import attend_as_before
from attnpo.models.scored import ScoredLM
from attnpo.schema import ModelInputs, TokenStats, UserError

log = logging.getLogger(__name__)

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(prompt ids, response ids) per row."""


Mode = Callable[[nn.Module], AbstractContextManager[None]]
"""A context in which a model is in a mode."""


class Laid(NamedTuple):
    """Model inputs with the response tokens they score: ids and mask in response space."""

    inputs: ModelInputs
    response_ids: Int[Tensor, "rows R"]
    response_mask: Bool[Tensor, "rows R"]


Layout = Callable[[Sequences, int], Laid]
"""Rows and the padding id to model inputs with their response tokens."""


def padded(sequences: Sequences, pad_id: int) -> Laid:
    """One right-padded model row per (prompt ids, response ids): the layout that any model can take.

    Row i of the batch is row i of response space. ``position_ids`` count on through the padding, so that no library
    takes the padding for a second packed sequence. ``predict_index[i, t]`` is the flat index (into batch*T) of the
    position before response token t: a causal model predicts a token from the state before it. Under a false
    ``response_mask`` it is 0 and ``response_ids`` holds ``pad_id``.

    Raises ``UserError`` when there is no sequence or a prompt is empty (its first response token would have no
    predicting state).
    """
    check_rows(sequences)
    input_ids, mask = padded_right([[*prompt, *response] for prompt, response in sequences], pad_id)
    rows, width = input_ids.shape
    starts = [row * width + len(prompt) for row, (prompt, _) in enumerate(sequences)]
    inputs = ModelInputs(
        input_ids=input_ids,
        position_ids=torch.arange(width).repeat(rows, 1),
        attention_mask=mask.long(),
        predict_index=_predict(sequences, [start - 1 for start in starts], starts),
    )
    return Laid(inputs, *padded_right([response for _, response in sequences], pad_id))


def packed(sequences: Sequences, pad_id: int) -> Laid:
    """All sequences one after the other in one row, without padding; positions restart with each.

    Raises ``UserError`` as ``padded`` does.
    """
    return _in_one_row(sequences, pad_id, 0)


def shared_prefix(sequences: Sequences, pad_id: int) -> Laid:
    """One row of pairs, each its prompt once, then the chosen and then the rejected response; no padding.

    Rows i and P+i of 2P are a pair. The rejected response sees the prompt and itself; its positions go on after the
    prompt, and its first token is predicted by the prompt's last state, as that of the chosen one is. A pair whose
    prompts differ (each branch is truncated by itself) lies in the row as two sequences, which is logged once; so do
    rows of an odd number. Raises ``UserError`` as ``padded`` does.
    """
    return _in_one_row(sequences, pad_id, len(sequences) // 2 if len(sequences) % 2 == 0 else 0)


LAYOUTS: dict[str, Layout] = {"padded": padded, "packed": packed, "shared_prefix": shared_prefix}
NAMES = ("auto", *LAYOUTS)


def choose(
    name: str, models: Sequence[ScoredLM], requests: Collection[str] = (), device: torch.device | str = "cpu"
) -> Layout:
    """The layout ``name`` if every model gives the same numbers with it as with ``padded``; else another.

    The log says which was not taken and why. ``auto`` is the first of ``shared_prefix`` and ``packed`` that can be
    taken. Each model is run twice, where it is, on a probe of a few dozen tokens; for training on a GPU so are a few
    layers like its own with random weights, on that GPU, whose kernels are others. No gradient, random state or mode
    is touched.

    Args:
        name: auto, padded, packed or shared_prefix.
        models: the policy, and the reference if it is a model.
        requests: what objective and source ask for, under the names of ``objective.requires``.
        device: where the models are trained.

    Raises:
        UserError: a name that is not known, or a model whose numbers change with what is padded beside a row.
    """
    if name not in NAMES:
        raise UserError(f"layout={name!r} is not known; one of {', '.join(NAMES)}")
    for model in models:
        if is_materialised(model.model):
            _require_padding_without_effect(model)
    order = ["shared_prefix", "packed", "padded"] if name == "auto" else [name, "padded"]
    for wanted, instead in itertools.pairwise(order):
        reason = reason_against(wanted, models, requests, device) if wanted != "padded" else None
        if reason is None:
            return LAYOUTS[wanted]
        for model in models:
            attend_as_before(model.model)
        log.log(
            logging.INFO if name == "auto" else logging.WARNING,
            "layout %s: %s; %s rows are used instead: the same numbers, more work",
            wanted,
            reason,
            instead,
        )
    return padded


def check_rows(sequences: Sequences) -> None:
    """Raises ``UserError`` when there is no sequence or a prompt is empty."""
    if not sequences:
        raise UserError("a batch needs at least one sequence, got none; check the sampler's batch size")
    for row, (prompt, _) in enumerate(sequences):
        if len(prompt) == 0:
            raise UserError(
                f"row {row}: the prompt has no token, so nothing predicts the first response token; give the chat "
                "template at least a beginning-of-sequence token or drop the row"
            )


def _in_one_row(sequences: Sequences, pad_id: int, pairs: int) -> Laid:
    """The row of ``packed``; if ``pairs`` is not 0, with one prompt for rows i and ``pairs``+i that have the same."""
    check_rows(sequences)
    ids: list[int] = []
    positions: list[int] = []
    segments: list[tuple[int, int, int, int]] = []
    before, starts = [0] * len(sequences), [0] * len(sequences)
    order = list(_order(sequences, pairs))
    for row, prefix in order:
        prompt, response = sequences[row]
        stretch = response if prefix is not None else [*prompt, *response]
        shared = len(prompt) if prefix is not None else 0
        first, begin = len(ids), len(ids) if prefix is None else before[prefix] - len(prompt) + 1
        segments.append((first, len(stretch), begin if shared else 0, shared))
        before[row] = begin + len(prompt) - 1
        starts[row] = first + len(prompt) - shared
        ids += stretch
        positions += range(shared, shared + len(stretch))
    inputs = ModelInputs(
        input_ids=torch.tensor([ids], dtype=torch.long),
        position_ids=torch.tensor([positions], dtype=torch.long),
        attention_mask=None,
        predict_index=_predict(sequences, before, starts),
        segments=torch.tensor(segments, dtype=torch.long),
        segment_rows=torch.tensor([row for row, _ in order]),
    )
    return Laid(inputs, *padded_right([response for _, response in sequences], pad_id))


def _order(sequences: Sequences, pairs: int) -> Iterator[tuple[int, int | None]]:
    """Rows in the order they lie in, each with the row before it whose prompt it shares."""
    for row in range(pairs or len(sequences)):
        yield row, None
        if pairs:
            same = list(sequences[row][0]) == list(sequences[pairs + row][0])
            if not same:
                _say_unshared()
            yield pairs + row, row if same else None


@cache
def _say_unshared() -> None:
    log.info(
        "layout shared_prefix: the prompts of a pair differ (each branch is truncated by itself); such pairs lie in "
        "the row as two sequences"
    )


def _predict(sequences: Sequences, before: Sequence[int], starts: Sequence[int]) -> Int[Tensor, "rows R"]:
    """Flat index of the state that predicts each token: ``before`` for the first, then the token to its left.

    ``starts``: where each row's first response token lies.
    """
    index = torch.zeros(len(sequences), max(len(response) for _, response in sequences), dtype=torch.long)
    for row, (_, response) in enumerate(sequences):
        count = len(response)
        index[row, :count] = torch.arange(starts[row] - 1, starts[row] - 1 + count)
        index[row, : min(count, 1)] = before[row]
    return index


def padded_right(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Int[Tensor, "rows T"], Bool[Tensor, "rows T"]]:
    """Ids of the rows, padded at their right, and a mask of those that are no padding."""
    each = [torch.tensor(list(row), dtype=torch.long) for row in rows]
    mask = pad_sequence([torch.ones_like(ids, dtype=torch.bool) for ids in each], batch_first=True)
    return pad_sequence(each, batch_first=True, padding_value=pad_id), mask


# ------------------------------------------------------------------------------------------------ which a model takes
PROBE = ((5, 9, 3), (11, 2, 14), (3, 6, 6))
"""Tokens of prompt, chosen and rejected response of the pairs that a layout is tried on."""

RATES = ("attention_dropout", "dropout")


def _require_padding_without_effect(model: ScoredLM) -> None:
    """Raises ``UserError`` when a row's numbers depend on the rows beside it; only warns in low precision."""
    what = type(model.model).__name__
    together = _probed(model, padded)
    gaps = []
    for row in range(len(together.logps)):
        alone = _probed(model, padded, row).logps[0]
        gaps.append(float((alone - together.logps[row, : len(alone)]).abs().max()))
    assert together.hidden is not None
    gap, bound = max(gaps), probe_bound(together.logps.to(together.hidden.dtype))
    if not gap > bound:  # numbers that are not finite are refused elsewhere
        return
    message = (
        f"model.path: log-probabilities of {what} change by {gap:.3g} with the longer rows beside them (rounding "
        f"allows {bound:.3g}), so a pair's loss would depend on its batch; take another model"
    )
    if together.hidden.dtype in (torch.float32, torch.float64):
        raise UserError(message)
    log.warning("%s", message)


def reason_against(
    wanted: str, models: Sequence[ScoredLM], requests: Collection[str] = (), device: torch.device | str = "cpu"
) -> str | None:
    """Returns why the models cannot take a layout in training on ``device``, or None; arguments as ``choose``."""
    device = torch.device(device)
    for request in sorted(requests):
        if request == "input_gradient" or request.startswith("group:"):
            return f"{request} is made from rows of one sequence each"
    for model in models:
        what = type(model.model).__name__
        if not is_materialised(model.model):
            return f"{what} is sharded or has no weights yet, so it cannot be tried"
        if wanted == "shared_prefix" and (rate := _dropout(model.model)):
            return f"{what} drops out with rate {rate:g}, and branches that share a prompt would share its draws"
        reason = _tried(wanted, model)
        if reason is None and device.type != "cpu":
            reason = _tried_elsewhere(wanted, model, device)
        if reason is not None:
            return f"{what} {reason}"
    return None


def _tried(wanted: str, model: ScoredLM, dtype: torch.dtype | None = None) -> str | None:
    """Returns why the model, where it is, cannot take a layout, or None; ``dtype``: that of products under autocast.

    Training mode is tried as well, whose kernels may be others, unless the model draws there or cannot run so here.
    """
    for mode, where in ((eval_mode, ""), (training_mode, "in training mode ")):
        if mode is training_mode and not _repeats(model, dtype):
            return None
        expected = _probed(model, padded, mode=mode)
        try:
            stats = _probed(model, LAYOUTS[wanted], mode=mode)
        except Exception as error:  # noqa: BLE001  # code of any model; whatever it raises, it cannot take the layout
            return f"{where}cannot follow segments of a row ({type(error).__name__}: {error})"
        gap = _gap(stats, expected, dtype)
        if gap is not None:
            return f"{where}gives other numbers ({gap}): some layer does not keep to the segments of a row"
    return None


def _repeats(model: ScoredLM, dtype: torch.dtype | None) -> bool:
    """Whether training mode gives the same numbers whatever the random state."""
    devices = [each for each in {part.device for part in model.parameters()} if each.type == "cuda"]
    found = []
    try:
        with torch.random.fork_rng(devices):
            for seed in range(2):
                torch.manual_seed(seed)
                found.append(_probed(model, padded, mode=training_mode))
    except Exception:  # noqa: BLE001  # as above; kernels of training may need another device than the model is on
        return False
    return _gap(found[1], found[0], dtype) is None


def _tried_elsewhere(wanted: str, model: ScoredLM, device: torch.device) -> str | None:
    """Returns why layers like the model's cannot take a layout on ``device``, in its dtype or bfloat16, or None."""
    with torch.random.fork_rng([device] if device.type == "cuda" and torch.cuda.is_available() else []):
        try:
            small = ScoredLM(first_layers(model.model, device))
        except Exception as error:  # noqa: BLE001  # as above: the config of any model
            return f"cannot be tried on {device}: no small model of its kind ({type(error).__name__}: {error})"
        reason = _tried(wanted, small)
        if reason is None and next(small.parameters()).dtype == torch.float32:
            with torch.autocast(device.type, torch.bfloat16):
                reason = _tried(wanted, small, torch.bfloat16)
    return None if reason is None else f"on {device} {reason}"


def first_layers(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A model of the same class, widths and dtype with random weights, of as few layers as hold one of every kind."""
    config = deepcopy(model.config)
    text = config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or [])
    text.num_hidden_layers = min(text.num_hidden_layers, max((kinds.index(kind) + 1 for kind in kinds), default=1))
    if kinds:
        text.layer_types = kinds[: text.num_hidden_layers]
    with device:
        made: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=next(model.parameters()).dtype, trust_remote_code=False
        )
    attend_as_before(made)
    return made


def _gap(stats: TokenStats, expected: TokenStats, dtype: torch.dtype | None = None) -> str | None:
    """Describes how far numbers are from those of padded rows; None when rounding (to ``dtype``) explains it."""
    assert expected.hidden is not None
    dtype = dtype or expected.hidden.dtype
    for name, ours, theirs in (
        ("final states", stats.hidden, expected.hidden),
        ("log-probabilities", stats.logps, expected.logps),
    ):
        assert ours is not None and theirs is not None
        # Log-probabilities are float32 whatever the states they come from were rounded to.
        gap, bound = float((ours - theirs).abs().max()), probe_bound(theirs.to(dtype))
        if not gap <= bound:  # NaN is no match either
            return f"{name} differ by {gap:.3g}, rounding allows {bound:.3g}"
    return None


@torch.no_grad()
def _probed(model: ScoredLM, layout: Layout, only: int | None = None, mode: Mode = eval_mode) -> TokenStats:
    """Statistics of the probe's rows, or of one of them alone, in a mode of the model."""
    device = next(model.model.parameters()).device
    words = vocabulary(model.model)
    ends = list(accumulate(sum(lengths) for lengths in PROBE))
    ids = [(7 * place + 3) % words for place in range(ends[-1])]
    chosen, rejected = [], []
    for end, (prompt, first, second) in zip(ends, PROBE, strict=True):
        start = end - prompt - first - second
        cut = start + prompt
        chosen.append((ids[start:cut], ids[cut : cut + first]))
        rejected.append((ids[start:cut], ids[cut + first : end]))
    rows = [*chosen, *rejected]
    inputs, response_ids, mask = layout(rows if only is None else rows[only : only + 1], 0)
    with mode(model.model):
        stats: TokenStats = model(
            inputs.to(device), response_ids.to(device), mask.to(device), frozenset({"logps", "hidden"})
        )
    return stats


def _dropout(model: nn.Module) -> float:
    """The largest rate at which a module of the model drops out in training."""
    rates: list[object] = []
    for module in model.modules():
        # Modules that call the function themselves keep its rate as a number; others hold a module under that name.
        rates += [module.p] if isinstance(module, nn.Dropout) else [vars(module).get(name) for name in RATES]
    return max((float(rate) for rate in rates if isinstance(rate, int | float)), default=0.0)
