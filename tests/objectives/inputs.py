"""Made-up inputs of any objective: what its ``requires`` names, in shapes as training gives them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnpo.objectives.base import PreferenceObjective, StepObjective
from attnpo.schema import InputGradient, ObjectiveOutput, PreferenceBatch, RowGroup, TokenStats
from tests.conformance.records import built

COUNTS = ((7, 3, 1, 4), (7, 2, 5, 1))  # response tokens of the chosen and the rejected sides
WIDTH = 7
GARBAGE = (float("inf"), float("-inf"), float("nan"))


@cache
def objective_of(option: str, *values: tuple[str, Any]) -> PreferenceObjective:
    """The objective that training builds for ``objective=option``, with other values of some keys."""
    objective: PreferenceObjective = built("objective", f"objective={option}", **dict(values))
    return objective


def make_rows(counts: tuple[int, ...], weights: Tensor | None = None, factors: bool = False) -> RowGroup:
    """A row group with responses of ``counts`` tokens; uniform weights unless some are given."""
    lengths = torch.tensor(counts)
    mask = torch.arange(max(*counts, 2)) < lengths[:, None]
    uniform = mask.double() / lengths[:, None]
    given = uniform if weights is None else weights
    return RowGroup(torch.zeros(mask.shape, dtype=torch.long), mask, {"reward": given}, lengths.double(), None, None,
                    factors)  # fmt: skip


def make_batch(rows: RowGroup, **fields: Any) -> PreferenceBatch:
    """A batch that is a whole optimiser step."""
    pairs = len(rows.response_mask) // 2
    tokens = rows.response_mask.sum(-1)
    counted = (int(tokens[:pairs].sum()), int(tokens[pairs:].sum()))
    names = tuple(map(str, range(pairs)))
    weight = torch.ones(pairs, dtype=torch.float64)
    return replace(PreferenceBatch({"main": rows}, weight, names, step_pairs=pairs, step_tokens=counted), **fields)


@dataclass(frozen=True)
class Case:
    """What one call of an objective reads, and what was looked at before the step."""

    policy: TokenStats
    reference: TokenStats | None
    batch: PreferenceBatch
    ahead: Mapping[str, tuple[TokenStats, TokenStats | None, RowGroup]] = field(default_factory=dict)

    @property
    def mask(self) -> Tensor:
        return self.batch.main.response_mask

    def with_policy(self, logps: Tensor) -> "Case":
        return replace(self, policy=replace(self.policy, logps=logps))

    def with_rows(self, **fields: Any) -> "Case":
        groups = {**self.batch.groups, "main": replace(self.batch.main, **fields)}
        return replace(self, batch=replace(self.batch, groups=groups))

    def with_state(self, objective: PreferenceObjective) -> "Case":
        """The case with what the objective sums over the rows ahead of the step."""
        if not isinstance(objective, StepObjective):
            return self
        state: dict[str, Tensor] = {}
        for policy, reference, rows in self.ahead.values():
            state |= objective.step_sums(policy, reference, rows)
        return replace(self, batch=replace(self.batch, state=state))


def _named(requires: frozenset[str], kind: str) -> list[str]:
    return sorted(name.partition(":")[2] for name in requires if name.startswith(f"{kind}:"))


class Maker:
    """Makes cases for an objective with these ``requires``, the same numbers every time."""

    def __init__(self, requires: frozenset[str]) -> None:
        self.requires = requires
        self.generator = torch.Generator().manual_seed(3)

    def random(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def stats(self, rows: RowGroup, logps: Tensor, joint: bool = True) -> TokenStats:
        shape, prompts = rows.response_mask.shape, (rows.response_mask.shape[0],)
        kept = rows.response_mask
        return TokenStats(
            logps * kept,
            hidden=self.random(*shape, 5) * kept[..., None] if joint and "hidden" in self.requires else None,
            vocab={name: self.random(*shape) * kept for name in _named(self.requires, "vocab")},
            joint={name: self.random(*shape) * kept for name in _named(self.requires, "joint")} if joint else {},
            input_gradient=InputGradient(
                self.random(*shape) * kept, self.random(*prompts), torch.full(prompts, 3, dtype=torch.long)
            )
            if joint and "input_gradient" in self.requires
            else None,
        )

    def both(self, rows: RowGroup, policy: Tensor, reference: Tensor) -> tuple[TokenStats, TokenStats | None]:
        return self.stats(rows, policy), (
            self.stats(rows, reference, joint=False) if "reference" in self.requires else None
        )

    def case(self, losing: bool = False) -> Case:
        """Random statistics; ``losing``: every chosen token far below, every rejected one above the reference.

        A losing case's further groups are the chosen rows once more, so that only the main rows pull.
        """
        counts = COUNTS[0] + COUNTS[1]
        rows = make_rows(counts)
        mask = rows.response_mask
        raw = (0.1 + self.random(*mask.shape)) * mask
        factors = "factors" in self.requires
        weights = raw if factors else raw / raw.sum(-1, keepdim=True)
        # The source counts one token more than training does, as a judge with another tokenizer may.
        rows = replace(rows, token_weights={"reward": weights}, source_lengths=rows.source_lengths + 1, factors=factors)
        half = len(COUNTS[0])
        reference, policy = -3 * self.random(*mask.shape), -3 * self.random(*mask.shape)
        if losing:  # tokens near -9 against tokens near -1: also the sum of one is below that of five
            gap = torch.tensor([-1.0] * half + [7.0] * half, dtype=torch.float64)[:, None]
            reference = reference / 30 - 8
            policy = reference + gap * (1 + 0.02 * policy)
        ours, theirs = self.both(rows, policy, reference)
        batch = make_batch(rows)
        for name in _named(self.requires, "group"):
            more = make_rows(COUNTS[0] if losing else (3, 1, 6, 2))
            shape = more.response_mask.shape
            given = (-3 * self.random(*shape), -3 * self.random(*shape))
            given = (policy[:half], reference[:half]) if losing else given
            mine, other = self.both(more, *given)
            ours = replace(ours, groups={**ours.groups, name: mine})
            theirs = None if theirs is None or other is None else replace(theirs, groups={**theirs.groups, name: other})
            batch = replace(batch, groups={**batch.groups, name: more})
        ahead = {}
        for name in _named(self.requires, "ahead"):
            before = make_rows((2, 6, 3, 3, 1))
            shape = before.response_mask.shape
            ahead[name] = (*self.both(before, -self.random(*shape), -2 * self.random(*shape)), before)
        return Case(ours, theirs, batch, ahead)


def make_case(objective: PreferenceObjective, losing: bool = False) -> Case:
    """A case of ``objective``, with the state of its step."""
    return Maker(objective.requires).case(losing).with_state(objective)


# --------------------------------------------------------------------------------------------- changes


def each(stats: TokenStats | None, change: Callable[[str, Tensor], Tensor]) -> TokenStats:
    """The statistics with ``change(group, tensor)`` made to every tensor; the group of the pairs is "main"."""
    assert stats is not None

    def made(group: str, part: TokenStats) -> TokenStats:
        gradient = part.input_gradient
        return replace(
            part,
            logps=change(group, part.logps),
            hidden=None if part.hidden is None else change(group, part.hidden),
            vocab={name: change(group, value) for name, value in part.vocab.items()},
            joint={name: change(group, value) for name, value in part.joint.items()},
            input_gradient=None
            if gradient is None
            else InputGradient(*(change(group, value) for value in vars(gradient).values())),
        )

    return replace(made("main", stats), groups={name: made(name, part) for name, part in stats.groups.items()})


def with_each(case: Case, stats: Callable[[str, Tensor], Tensor], rows: Callable[[str, RowGroup], RowGroup]) -> Case:
    """The case with changes made to every tensor of the statistics and to every row group."""
    return replace(
        case,
        policy=each(case.policy, stats),
        reference=None if case.reference is None else each(case.reference, stats),
        batch=replace(case.batch, groups={name: rows(name, group) for name, group in case.batch.groups.items()}),
    )


def taken(case: Case, main: list[int], others: list[int]) -> Case:
    """The case with these rows of the main group and of the others, and as many pairs; the step stays what it was."""

    def rows(name: str, group: RowGroup) -> RowGroup:
        index = main if name == "main" else others
        return replace(
            group,
            response_ids=group.response_ids[index],
            response_mask=group.response_mask[index],
            token_weights={key: value[index] for key, value in group.token_weights.items()},
            source_lengths=group.source_lengths[index],
        )

    found = with_each(case, lambda name, value: value[main if name == "main" else others], rows)
    weight = case.batch.pair_weight[others]
    return replace(found, batch=replace(found.batch, pair_weight=weight, pair_ids=tuple(map(str, others))))


def part(case: Case, pairs: list[int]) -> Case:
    """The micro-batch of these pairs."""
    return taken(case, pairs + [index + case.batch.pairs for index in pairs], pairs)


def swapped(case: Case) -> Case:
    """Chosen and rejected responses in each other's places."""
    pairs = list(range(case.batch.pairs))
    return taken(case, [index + len(pairs) for index in pairs] + pairs, pairs)


def garbled(case: Case) -> Case:
    """Infinities and NaN wherever a mask is false."""
    masks = {name: rows.response_mask for name, rows in case.batch.groups.items()}

    def spoil(name: str, value: Tensor) -> Tensor:
        if value.shape[:2] != masks[name].shape or not value.is_floating_point():
            return value
        junk = torch.tensor(GARBAGE, dtype=value.dtype).repeat(value.numel())[: value.numel()].reshape(value.shape)
        return torch.where(masks[name].reshape(*masks[name].shape, *[1] * (value.ndim - 2)), value, junk)

    def rows(name: str, group: RowGroup) -> RowGroup:
        return replace(group, token_weights={key: spoil(name, value) for key, value in group.token_weights.items()})

    return with_each(case, spoil, rows)


def wider(case: Case, columns: int = 3) -> Case:
    """More padding after every row."""
    shapes = {name: rows.response_mask.shape for name, rows in case.batch.groups.items()}

    def pad(name: str, value: Tensor) -> Tensor:
        if value.shape[:2] != shapes[name]:
            return value
        return torch.cat([value, value.new_zeros(value.shape[0], columns, *value.shape[2:])], dim=1)

    def rows(name: str, group: RowGroup) -> RowGroup:
        return replace(
            group,
            response_ids=pad(name, group.response_ids),
            response_mask=pad(name, group.response_mask),
            token_weights={key: pad(name, value) for key, value in group.token_weights.items()},
        )

    return with_each(case, pad, rows)


def single(case: Case) -> Case:
    """The case in float32."""

    def cast(name: str, value: Tensor) -> Tensor:
        return value.float() if value.is_floating_point() else value

    def rows(name: str, group: RowGroup) -> RowGroup:
        weights = {key: value.float() for key, value in group.token_weights.items()}
        return replace(group, token_weights=weights, source_lengths=group.source_lengths.float())

    return with_each(case, cast, rows)


# --------------------------------------------------------------------------------------------- results


def call(objective: PreferenceObjective, case: Case) -> ObjectiveOutput:
    return objective(case.policy, case.reference, case.batch)


def with_gradient(objective: PreferenceObjective, case: Case) -> tuple[ObjectiveOutput, Tensor]:
    """The output, and the gradient of the summed losses at the policy's log-probabilities."""
    leaf = case.policy.logps.clone().requires_grad_()
    out = call(objective, case.with_policy(leaf))
    (gradient,) = torch.autograd.grad(out.losses.sum(), leaf)
    return out, gradient


def with_leaves(objective: PreferenceObjective, case: Case) -> tuple[ObjectiveOutput, TokenStats]:
    """Returns the output, and the policy's statistics with the gradients of the summed losses."""
    policy = each(case.policy, lambda _, value: value.clone().requires_grad_())
    out = call(objective, replace(case, policy=policy))
    out.losses.sum().backward()
    return out, policy
