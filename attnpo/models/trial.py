"""Checks on a few dozen tokens that packing and padding do not change a model's results.

Isolation of sequences is checked bitwise: changing the tokens of other sequences must not change any bit of a result.
Positions and windows are checked in float32, on the model, or on a few layers of the same kind with seeded random
weights. Rounding errors of lower precisions are only logged. The judge uses some of the checks.
"""

import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnpo.models.backbone import eval_mode, is_materialised, layer_stack, probe_bound, training_mode, vocabulary_size
from attnpo.models.layouts import LAYOUTS, NAMES, Layout, Sequences, padded_layout, right_pad
from attnpo.models.packed_attention import restore_attention
from attnpo.models.prompt_rows import WORTH
from attnpo.models.scored import ScoredLM
from attnpo.schema import TokenStats, UserError

log = logging.getLogger(__name__)

VERSION = 1
"""Version of the checks; a change invalidates cached layouts."""

EXACT = (torch.float32, torch.float64)
"""Dtypes precise enough to compare two computations by the difference of their results."""

LOW_PRECISION_SLACK = 10
"""Factor by which the difference between two bfloat16 kernels may exceed the bound for a product with the head.

That bound is ``probe_bound``.
"""


class BlockRecorder:
    """Records which block a forward pass is running (1-based), and each block's output."""

    def __init__(self, backbone: nn.Module) -> None:
        self.blocks = layer_stack(backbone)
        self.number = 1
        self.outputs: dict[int, Tensor] = {}

    @contextmanager
    def record(self) -> Iterator[None]:
        """Records forward passes inside the context."""
        handles = []
        for number, block in enumerate(self.blocks, 1):
            handles.append(block.register_forward_pre_hook(partial(self._enter, number)))
            handles.append(block.register_forward_hook(partial(self._record_output, number)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, number: int, module: nn.Module, inputs: object) -> None:
        self.number = number

    def _record_output(self, number: int, module: nn.Module, inputs: object, output: object) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if isinstance(states, Tensor):
            self.outputs[number] = states


def is_different(actual: Tensor, expected: Tensor) -> bool:
    """Returns whether values differ by more than the results of two kernels may; bounds are looser in low precision."""
    slack = 1 if expected.dtype in (torch.float32, torch.float64) else LOW_PRECISION_SLACK
    return not float((actual - expected).abs().max()) <= slack * probe_bound(expected)  # NaN is no match either


def probe_prompts(words: int, kept: int | None = None) -> list[list[int]]:
    """Returns four prompts for the checks.

    The first shares a long prefix with the second, a shorter one with the third, and none with the fourth. ``kept``:
    index of the prompt that keeps its tokens while the others get new ones outside the shared prefix; None keeps all.
    """
    start = [(7 * place + 3 + (kept == 3)) % words for place in range(WORTH + 9)]
    ends = [
        [(11 * place + 5 * index + (kept not in (None, index))) % words for place in range(6 + 2 * index)]
        for index in range(4)
    ]
    return [start + ends[0], start + ends[1], start[:WORTH] + ends[2], ends[3]]


def right_pad_prompts(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pads prompts on the right with id 0, which is never read; returns ids [batch T] and last positions [batch]."""
    ids, mask = right_pad(prompts, 0)
    return ids.to(device), (mask.sum(1) - 1).to(device)


# ------------------------------------------------------------------------------------------------ a model alone


@torch.no_grad()
def check_causal(model: PreTrainedModel, path: str) -> None:
    """Checks on six tokens that the model is causal and runs on token ids.

    If any bit changes in low precision, the check is repeated in float32 on a few layers like the model's.

    Raises:
        UserError: the model fails, or a later token changes the logits of earlier tokens.
    """
    ids = torch.arange(3, 9, device=model.device).repeat(4, 1)
    ids[1:, -1] += torch.arange(1, 4, device=model.device)
    change = bound = 0.0
    with _wrap_run_errors(model, path, "cannot be run on token ids alone", "choose a causal text model"):
        change, bound = _last_token_effect(model, ids)
        if change > 0 and model.dtype not in EXACT:
            change, bound = _last_token_effect(make_small_copy(model, model.device, torch.float32), ids)
    if change > bound:
        raise UserError(
            f"{path}: {type(model).__name__} is not causal: changing the last token changes the logits of earlier "
            f"tokens by {change:.3g} (rounding explains at most {bound:.3g}), so they do not yield the log-probability "
            "of a response: choose a causal model (for BERT-like models, one trained as a decoder, with "
            "is_decoder=true in its config.json)"
        )


@torch.no_grad()
def check_trainable(model: PreTrainedModel, path: str) -> None:
    """Raises UserError if the model's forward fails on six tokens in training mode; preserves random state and mode."""
    if model.device.type == "cpu" and torch.cuda.is_available():
        return  # it may need kernels that only a GPU has, and is moved there before use
    ids = torch.arange(3, 9, device=model.device)[None] % vocabulary_size(model)
    mend = "change the setting that the error names in config.json, or choose another model"
    what = f"cannot run in training mode, tried on {ids.shape[1]} tokens"
    with _wrap_run_errors(model, path, what, mend), training_mode(model):
        model(input_ids=ids, use_cache=False)


@contextmanager
def _wrap_run_errors(model: PreTrainedModel, path: str, what: str, mend: str) -> Iterator[None]:
    """Converts errors in a model's code inside the context to a ``UserError``."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any model
        if model.device.type == "cpu" and torch.cuda.is_available():
            return  # it may need kernels that only a GPU has, and is moved there before use
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError(f"{path}: {type(model).__name__} {what} ({words}); {mend}") from error


def _last_token_effect(model: PreTrainedModel, ids: Tensor) -> tuple[float, float]:
    """Returns the smallest change in earlier logits caused by changing the last token, and the rounding bound."""
    output = model(input_ids=ids % vocabulary_size(model), use_cache=False)
    # A backbone returns hidden states.
    numbers = (output.logits if "logits" in output else output.last_hidden_state)[:, :-1]
    return float((numbers[1:] - numbers[:1]).abs().amax((1, 2)).min()), probe_bound(numbers)


# ------------------------------------------------------------------------------------------------ layouts

PROBE = ((5, 9, 3), (11, 2, 14), (3, 6, 6))
"""Lengths of prompt, chosen and rejected response of the pairs used to check a layout."""

KEPT = (((0, 0), (0, 1), (2, 0), (2, 1)), ((0, 0), (0, 2), (2, 0), (2, 2)), ((1, 0), (1, 1)), ((1, 0), (1, 2)))
"""Parts, as (pair, part), that keep their tokens while all others get new ones: prompt 0, chosen 1, rejected 2."""

RESPONSES = [(pair, part) for pair in range(len(PROBE)) for part in (1, 2)]

RATES = ("attention_dropout", "dropout")
WORDS = 1024
"""Vocabulary size of a small copy; a full vocabulary would account for most of its memory and time."""

Mode = Callable[[nn.Module], AbstractContextManager[None]]
"""Context manager that puts a model in eval or training mode."""


def select_layout(
    name: str, models: Sequence[ScoredLM], requests: Collection[str] = (), device: torch.device | str = "cpu"
) -> Layout:
    """Returns the layout ``name`` if every model produces the same results as with ``padded``, otherwise ``padded``.

    ``auto`` selects the first of ``shared_prefix`` and ``packed`` that works. Each model runs on a few dozen tokens; in
    low precision, and for training on a GPU, a few layers like the model's run as well. ``models``: the policy, and the
    reference if it is a model; ``requests``: as in ``objective.requires``; ``device``: training device.

    Raises:
        UserError: the name is unknown, or a model's results for a row depend on the padding next to it.
    """
    if name not in NAMES:
        raise UserError(f"layout={name!r} is unknown: choose one of {', '.join(NAMES)}")
    for model in models:
        if is_materialised(model.model):
            _check_padding_invariance(model)
    order = ["shared_prefix", "packed", "padded"] if name == "auto" else [name, "padded"]
    for wanted, instead in itertools.pairwise(order):
        reason = find_layout_problem(wanted, models, requests, device) if wanted != "padded" else None
        if reason is None:
            return LAYOUTS[wanted]
        for model in models:
            restore_attention(model.model)
        log.log(
            logging.INFO if name == "auto" else logging.WARNING,
            "layout %s: %s; %s rows are used instead, which give the same results but are slower",
            wanted,
            reason,
            instead,
        )
    return padded_layout


def _check_padding_invariance(model: ScoredLM) -> None:
    """Raises ``UserError`` if a row's results depend on its batch; in low precision, a small float32 copy decides."""
    what = type(model.model).__name__
    gap, bound = _find_padding_gap(model)
    if not gap > bound:  # non-finite numbers are rejected elsewhere
        return
    if (dtype := model.model.dtype) not in EXACT:
        rounded, small = gap, ScoredLM(make_small_copy(model.model, model.model.device, torch.float32))
        gap, bound = _find_padding_gap(small)
        if not gap > bound:
            log.info(
                "log-probabilities of %s change by %.2g with longer rows in the batch; this is rounding error in %s, "
                "because a few layers like the model's show no change in float32",
                *(what, rounded, str(dtype).removeprefix("torch.")),
            )
            return
    raise UserError(
        f"model.path: log-probabilities of {what} change by {gap:.3g} with longer rows in the batch (rounding explains "
        f"at most {bound:.3g}), so a pair's loss would depend on its batch: choose another model"
    )


def _find_padding_gap(model: ScoredLM) -> tuple[float, float]:
    """Returns the difference between single rows and the same rows in a padded batch, and the rounding bound."""
    together = _run_probe(model, padded_layout)
    assert together.hidden is not None
    gaps = []
    for row in range(len(together.logps)):
        alone = _run_probe(model, padded_layout, row).logps[0]
        gaps.append(float((alone - together.logps[row, : len(alone)]).abs().max()))
    return max(gaps), probe_bound(together.logps.to(together.hidden.dtype))


def find_layout_problem(
    wanted: str, models: Sequence[ScoredLM], requests: Collection[str] = (), device: torch.device | str = "cpu"
) -> str | None:
    """Returns why the models cannot train with a layout on ``device``, or None; arguments as in ``select_layout``."""
    device = torch.device(device)
    for request in sorted(requests):
        if needs_separate_rows(request):
            return f"{request} needs rows that contain one sequence each"
    for model in models:
        what = type(model.model).__name__
        if not is_materialised(model.model):
            return f"{what} is sharded or has no weights yet, so it cannot be checked"
        if wanted == "shared_prefix" and (rate := _max_dropout(model.model)):
            return (
                f"{what} uses dropout with rate {rate:g}, and branches that share a prompt would share one dropout mask"
            )
        reason = _find_problem(wanted, model) or _find_problem_in_small_copy(wanted, model, device)
        if reason is not None:
            return f"{what} {reason}"
    return None


def needs_separate_rows(request: str) -> bool:
    """Returns whether a requested statistic needs rows that contain one sequence each."""
    return request == "input_gradient" or request.startswith("group:")


def _find_problem(wanted: str, model: ScoredLM, dtype: torch.dtype | None = None) -> str | None:
    """Returns why a layout does not work for the model in eval or training mode, or None; ``dtype``: for autocast."""
    for mode, where in ((eval_mode, ""), (training_mode, "in training mode ")):
        if mode is training_mode and not _is_deterministic_in_training(model):
            return None
        expected = _run_probe(model, padded_layout, mode=mode)
        try:
            stats = _run_probe(model, LAYOUTS[wanted], mode=mode)
        except Exception as error:  # noqa: BLE001  # code of any model; whatever it raises, it cannot take the layout
            return f"{where}cannot follow segments of a row ({type(error).__name__}: {error})"
        assert expected.hidden is not None and stats.hidden is not None
        dtype = dtype or expected.hidden.dtype
        if dtype in EXACT:
            gap = _describe_gap(stats, expected)
            if gap is not None:
                return f"{where}produces different results ({gap}): some layer does not respect the segments of a row"
        elif (rows := _rows_changed_by_others(model, LAYOUTS[wanted], mode)) and not _rows_changed_by_others(
            model, padded_layout, mode
        ):
            return (
                f"{where}mixes sequences: the results of {len(rows)} of {2 * len(PROBE)} sequences change with the "
                "tokens of other sequences, because some layer does not respect the segments of a row"
            )
        elif blind := _rows_ignoring_prompt(model, LAYOUTS[wanted], mode):
            return f"{where}ignores the prompt in the results of {len(blind)} of {2 * len(PROBE)} sequences"
        elif mode is eval_mode:
            apart, size = (stats.hidden - expected.hidden).float(), expected.hidden.float()
            log.debug(
                "layout %s: rounding to %s changes the final states by %.2g of their root mean square",
                wanted,
                dtype,
                float(apart.square().mean().sqrt() / size.square().mean().sqrt()),
            )
    return None


def _is_deterministic_in_training(model: ScoredLM) -> bool:
    """Returns whether training mode is deterministic, i.e. its results do not depend on the random state."""
    devices = [each for each in {part.device for part in model.parameters()} if each.type == "cuda"]
    found = []
    try:
        with torch.random.fork_rng(devices):
            for seed in range(2):
                torch.manual_seed(seed)
                found.append(_run_probe(model, padded_layout, mode=training_mode))
    except Exception:  # noqa: BLE001  # as above; kernels of training may need another device than the model is on
        return False
    return _describe_gap(found[1], found[0]) is None


def _rows_changed_by_others(model: ScoredLM, layout: Layout, mode: Mode) -> list[int]:
    """Returns the rows whose results change in any bit with other rows' tokens; empty if a rerun changes bits too."""
    base = _run_probe(model, layout, mode=mode)
    found = set()
    for kept in KEPT:
        other = _run_probe(model, layout, mode=mode, kept=kept)
        for row, (pair, part) in enumerate((pair, part) for part in (1, 2) for pair in range(len(PROBE))):
            if (pair, 0) in kept and (pair, part) in kept and not _has_same_bits(base, other, row, PROBE[pair][part]):
                found.add(row)
    if found and not all(_has_same_bits(base, _run_probe(model, layout, mode=mode), row, None) for row in found):
        return []
    return sorted(found)


def _rows_ignoring_prompt(model: ScoredLM, layout: Layout, mode: Mode) -> list[int]:
    """Returns the rows whose first response token ignores the last token of the prompt."""
    base, other = (_run_probe(model, layout, mode=mode, kept=kept, last=True) for kept in (None, RESPONSES))
    assert base.hidden is not None and other.hidden is not None
    second = zip(base.hidden[:, 1], other.hidden[:, 1], strict=True)  # the state of each row's first response token
    return [row for row, (one, two) in enumerate(second) if torch.equal(one, two) and one.any()]


def _has_same_bits(one: TokenStats, other: TokenStats, row: int, count: int | None) -> bool:
    assert one.hidden is not None and other.hidden is not None
    return torch.equal(one.hidden[row, :count], other.hidden[row, :count])


def _find_problem_in_small_copy(wanted: str, model: ScoredLM, device: torch.device) -> str | None:
    """Returns why a layout does not work on ``device`` for a few layers like the model's, or None."""
    dtype = model.model.dtype
    if device.type == "cpu" and dtype in EXACT:
        return None
    try:
        small = ScoredLM(make_small_copy(model.model, device, torch.float32))
    except Exception as error:  # noqa: BLE001  # as above: the config of any model
        return f"cannot be checked on {device}: a small copy cannot be built ({type(error).__name__}: {error})"
    reason = _find_problem(wanted, small)
    if reason is None and device.type != "cpu" and dtype in EXACT:
        with torch.autocast(device.type, torch.bfloat16):
            reason = _find_problem(wanted, small, torch.bfloat16)
    elif reason is None and device.type != "cpu":
        reason = _find_problem(wanted, ScoredLM(make_small_copy(model.model, device)))
    return None if reason is None else f"on {device} {reason}"


def make_small_copy(model: PreTrainedModel, device: torch.device, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Makes a model of the same class and widths with one layer of each kind, on ``device``.

    The random weights are reproducible; the vocabulary is reduced to ``WORDS``. ``dtype``: None uses the model's.
    """
    config = deepcopy(model.config)
    text = config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or [])
    text.num_hidden_layers = min(text.num_hidden_layers, max((kinds.index(kind) + 1 for kind in kinds), default=1))
    if kinds:
        text.layer_types = kinds[: text.num_hidden_layers]
    if text.vocab_size > WORDS:
        text.vocab_size, text.pad_token_id = WORDS, None
    with torch.random.fork_rng([device] if device.type == "cuda" and torch.cuda.is_available() else []), device:
        torch.manual_seed(0)
        made: PreTrainedModel = type(model)._from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype or model.dtype
        )
    restore_attention(made)
    made.train(False)
    return made


def _describe_gap(stats: TokenStats, expected: TokenStats) -> str | None:
    """Describes the difference from padded rows; None if rounding explains it."""
    assert expected.hidden is not None
    for name, ours, theirs in (
        ("final states", stats.hidden, expected.hidden),
        ("log-probabilities", stats.logps, expected.logps),
    ):
        assert ours is not None and theirs is not None
        # Log-probabilities are float32 even if the hidden states are not.
        gap, bound = float((ours - theirs).abs().max()), probe_bound(theirs.to(expected.hidden.dtype))
        if not gap <= bound:  # NaN is no match either
            return f"{name} differ by {gap:.3g}; rounding explains at most {bound:.3g}"
    return None


@torch.no_grad()
def _run_probe(
    model: ScoredLM,
    layout: Layout,
    only: int | None = None,
    mode: Mode = eval_mode,
    kept: Collection[tuple[int, int]] | None = None,
    last: bool = False,
) -> TokenStats:
    """Computes statistics of all probe rows or of row ``only``; ``kept``: parts that keep their tokens (None: all)."""
    device = next(model.model.parameters()).device
    words = vocabulary_size(model.model)
    starts = [0, *accumulate(itertools.chain.from_iterable(PROBE))]
    parts = []
    for index, (start, end) in enumerate(itertools.pairwise(starts)):
        new = kept is not None and (index // 3, index % 3) not in kept
        parts.append([(7 * at + 3 + (new and (at == end - 1 or not last))) % words for at in range(start, end)])
    rows: Sequences = [(parts[3 * pair], parts[3 * pair + part]) for part in (1, 2) for pair in range(len(PROBE))]
    inputs, response_ids, mask = layout(rows if only is None else rows[only : only + 1], 0)
    with mode(model.model):
        stats: TokenStats = model(
            inputs.to(device), response_ids.to(device), mask.to(device), frozenset({"logps", "hidden"})
        )
    return stats


def _max_dropout(model: nn.Module) -> float:
    """Returns the largest dropout rate of the model's modules."""
    rates: list[object] = []
    for module in model.modules():
        # Modules that call the functional form store the rate as a number; others have a dropout module of that name.
        rates += [module.p] if isinstance(module, nn.Dropout) else [vars(module).get(name) for name in RATES]
    return max((float(rate) for rate in rates if isinstance(rate, int | float)), default=0.0)
