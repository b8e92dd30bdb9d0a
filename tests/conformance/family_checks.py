"""One family's model held to the library's own numbers: eager attention, one sequence at a time, the whole model.

What attnpo computes: the judge's rows, rollout and verdict, a policy's log-probabilities and gradients in every layout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnpo.judge.base import JudgeReading
from attnpo.judge.causal_judge import CausalJudge, kernel_for
from attnpo.models.description import ModelDescription
from attnpo.models.layouts import LAYOUTS, Layout, Sequences, padded_layout
from attnpo.models.loading import inspect_model, load_config, load_model
from attnpo.models.memory import ModelShape
from attnpo.models.packed_attention import restore_attention
from attnpo.models.scored import ScoredLM
from attnpo.models.trial import check_trainable, find_layout_problem, select_layout
from attnpo.schema import UserError

WORDS = 90  # ids 5 to 94 are words in every tiny vocabulary
START = [7 * place % WORDS + 5 for place in range(40)]
PROMPTS: list[list[int]] = [
    [*START, 5, 6, 7],
    [*START, 50, 51, 52, 53],
    START[:9],
]  # two that begin alike; longer than windows
PAIRS: Sequences = [  # two pairs, chosen first; the prompts of each are the same
    (START[:12], START[12:20]),
    (START[3:7], START[20:25]),
    (START[:12], START[20:]),
    (START[3:7], [9, 8]),
]
LABELS = (40, 41)
# float32, on peaked random weights: absolute, absolute, share of a parameter's largest gradient.
ROWS, LOGPS, GRADIENTS = 1e-4, 2e-4, 2e-3


Own = tuple[list[Tensor], Tensor]
"""Attention maps [heads T T] of the layers that have some, and the logits [T V], of one sequence."""


Step = tuple[list[Tensor], dict[str, Tensor]]
"""Log-probabilities of responses, and gradients by parameter."""


@dataclass(frozen=True)
class Finding:
    """What one check came to: its largest error, ``reason`` where it was refused, ``problem`` where it failed."""

    check: str
    error: float | None = None
    reason: str = ""
    problem: str = ""


class Held:
    """A folder's model through our loader, and the same weights as the library runs them by itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = load_model(folder)

    @cached_property
    def read(self) -> PreTrainedModel:
        """The model as a judge loads it."""
        reading = self.description.judge_attention
        return self.model if reading == "sdpa" else load_model(self.folder, attn_implementation=reading)

    @cached_property
    def description(self) -> ModelDescription:
        """The class, its attention, and the layers that have one to read."""
        return inspect_model(self.folder)

    @cached_property
    def eager(self) -> PreTrainedModel:
        """The library's own model with eager attention."""
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self.folder, attn_implementation="eager", trust_remote_code=False
        )
        model.train(False)
        return model

    @property
    def depth(self) -> int | None:
        """The number of layers that the config states; None for a model of several stacks."""
        depth: int | None = getattr(self.model.config.get_text_config(), "num_hidden_layers", None)
        return depth

    def own(self, ids: Sequence[int]) -> Own:
        """Attention maps of the layers that have one to read, or of all that give some, and the logits."""
        with torch.no_grad():
            output = self.eager(input_ids=torch.tensor([list(ids)]), output_attentions=True, use_cache=False)
        given = [each for each in getattr(output, "attentions", None) or () if each is not None]
        layers = self.description.layers
        if len(layers) < len(given) == self.depth:
            given = [given[layer - 1] for layer in layers] or given  # linear attention gives states as well
        return [each[0].float() for each in given], output.logits[0].float()


def findings(folder: Path) -> Iterator[Finding]:
    """Every check of a model in turn; one that the loader refuses gives that alone."""
    try:
        held = Held(folder)
    except UserError as error:
        yield Finding("load", reason=str(error))
        return
    yield Finding("load", 0.0)
    yield from judged(held)
    yield from laid(held)
    yield counted(held)


def judged(held: Held) -> Iterator[Finding]:
    """Rows of every layer, rollout and verdict of the judge, read of all prompts together and of each alone."""
    layers, name = held.description.layers, held.description.name
    own = [held.own(ids) for ids in PROMPTS]
    if not layers:
        yield Finding("rows", reason=f"{name}: {held.description.why}")
        return
    depth = held.depth or "?"
    whole = len(layers) == held.depth
    judge = CausalJudge(held.read, kernel=kernel_for(held.description))
    try:
        read = partial(
            judge.read,
            layers=layers,
            per_head=len({len(each) for each in own[0][0]}) == 1,
            rollout=whole,
            label_ids=LABELS,
        )
        together = read(PROMPTS)
        alone = [read([ids])[0] for ids in PROMPTS]
    except UserError as error:
        yield Finding(f"read by -, {len(layers)} of {depth}", 0.0)
        yield Finding("rows", reason=str(error))
        return
    yield Finding(f"read by {judge.kernel}, {len(layers)} of {depth}", 0.0)
    if any(len(maps) != len(layers) for maps, _ in own):
        yield Finding(
            "rows", problem=f"the library gives {len(own[0][0])} maps, we know {len(layers)} layers with attention"
        )
        return
    for how, readings in (("together", together), ("alone", alone)):
        yield _close(f"rows {how}", _row_errors(readings, own), ROWS)
        verdicts = [
            (reading.verdict_logits, logits[-1, list(LABELS)])
            for reading, (_, logits) in zip(readings, own, strict=True)
        ]
        sizes = [max(1.0, float(logits.abs().max())) for _, logits in own]
        yield _close(
            f"verdict {how}",
            [
                float((ours - theirs).abs().max()) / size
                for (ours, theirs), size in zip(verdicts, sizes, strict=True)
                if ours is not None
            ],
            LOGPS,
        )
        if whole and (
            errors := _rollout_errors(readings, own)
        ):  # none where the library's maps are not those of its output
            yield _close(f"rollout {how}", errors, ROWS)


def _row_errors(readings: Sequence[JudgeReading], own: Sequence[Own]) -> list[float]:
    errors = []
    for reading, (maps, _) in zip(readings, own, strict=True):
        for ours, theirs in zip(reading.rows, maps, strict=True):
            row = theirs[:, -1] if ours.dim() == 2 else theirs[:, -1].mean(0)
            if leaves_out_sinks(ours, row):
                row = row * ours.sum(-1, keepdim=True)
            errors.append(float((ours - row).abs().max()))
    return errors


def leaves_out_sinks(ours: Float[Tensor, "*heads T"], theirs: Float[Tensor, "*heads T"]) -> bool:
    """Whether the library's map sums to 1 where ours, a share of the layer's output, has a sink's part less."""
    return float((theirs.sum(-1) - 1).abs().max()) < 1e-4 < float((1 - ours.sum(-1)).max())


def _rollout_errors(readings: Sequence[JudgeReading], own: Sequence[Own]) -> list[float]:
    errors = []
    for reading, (maps, _) in zip(readings, own, strict=True):
        rows = zip(reading.rows, maps, strict=True)
        if reading.rollout is None or any(
            leaves_out_sinks(ours, theirs[..., -1, :]) for ours, theirs in rows if ours.dim() == 2
        ):
            continue
        product = torch.eye(maps[0].shape[-1])
        for each in maps:
            product = (torch.eye(len(product)) + each.mean(0)) / 2 @ product
        errors.append(float((reading.rollout - product[-1]).abs().max()))
    return errors


def laid(held: Held) -> Iterator[Finding]:
    """Log-probabilities and gradients of the policy in every layout, and the one that ``auto`` takes."""
    policy = ScoredLM(held.model)
    try:
        check_trainable(held.model, held.folder.name)
    except UserError as error:
        yield Finding("step", reason=str(error))
        return
    try:
        own = _own_step(held.eager)
    except Exception as error:  # noqa: BLE001  # what the library's own model raises in training outside of a trainer
        yield Finding("step", reason=f"the library's own step fails: {type(error).__name__}: {error}")
        return
    try:
        taken = select_layout("auto", [policy])
    except UserError as error:
        yield Finding("layouts", reason=str(error))
        return
    yield Finding(f"auto is {next(name for name, layout in LAYOUTS.items() if layout is taken)}", 0.0)
    for name, layout in LAYOUTS.items():
        against = None if layout is padded_layout else find_layout_problem(name, [policy])
        if against is None:
            yield from _step(held, policy, name, layout, own)
        else:
            restore_attention(held.model)
            yield Finding(name, reason=against)


def _step(held: Held, policy: ScoredLM, name: str, layout: Layout, own: Step) -> list[Finding]:
    inputs, ids, mask = layout(PAIRS, 0)
    held.model.zero_grad()
    logps = policy(inputs, ids, mask).logps
    sum(float(sign) * row.sum() for sign, row in zip(_signs(), logps, strict=True)).backward()
    ours = list(logps.detach()), _gradients(held.model)
    found = _compared(name, ours, own)
    if any(one.problem for one in found):  # two kernels of the library may round apart, on weights this peaked
        found = _compared(name, ours, _own_step(held.model))
    return found


def _compared(name: str, ours: Step, own: Step) -> list[Finding]:
    logps = [float((row[: len(want)] - want).abs().max()) for row, want in zip(ours[0], own[0], strict=True)]
    errors = []
    for part, want in own[1].items():
        got = ours[1].get(part, torch.zeros_like(want))
        errors.append(float((got - want).abs().max()) / max(1e-3, float(want.abs().max())))
    return [_close(f"{name} log-probs", logps, LOGPS), _close(f"{name} gradients", errors, GRADIENTS)]


def _own_step(model: PreTrainedModel) -> Step:
    """The library's log-probabilities of responses, each alone in a plain forward; gradients of their signed sum."""
    model.zero_grad()
    found = []
    for sign, (prompt, response) in zip(_signs(), PAIRS, strict=True):
        logits = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0].float()
        rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        logps = rows.gather(1, torch.tensor(list(response))[:, None])[:, 0]
        (sign * logps.sum()).backward()
        found.append(logps.detach())
    return found, _gradients(model)


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """The gradients that there are, by name; the model keeps none."""
    found = {name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None}
    model.zero_grad()
    return found


def _signs() -> list[float]:
    """Chosen responses count up, rejected ones down, each with a size of its own."""
    return [1.0, 0.5, -0.7, -1.2]


def counted(held: Held) -> Finding:
    """Whether the memory estimate counts the parameters that there are."""
    try:
        said = ModelShape.from_model_config(load_config(held.folder)).parameters
    except UserError as error:
        return Finding("memory", reason=str(error))
    there = sum(part.numel() for part in held.model.parameters())
    return Finding("memory", 0.0, problem="" if said == there else f"{said} parameters estimated, {there} there")


def _close(check: str, errors: Sequence[float], limit: float) -> Finding:
    worst = max(errors, key=lambda error: torch.inf if error != error else error, default=torch.inf)
    within = worst <= limit  # false for NaN
    return Finding(check, worst, problem="" if within else f"largest error {worst:.1e}, at most {limit:.0e}")
