"""Transport weights: the plan against a plain solution of each pair, what may not matter, and the source around it."""

import math

import pytest
import torch
from torch import Tensor

from attnpo.schema import EncodedResponse, PreferenceBatch, PreferencePair, RowGroup, TokenStats
from attnpo.weights.pipeline import training_weights
from attnpo.weights.sources.transport import LEAST_REG, Transport, solve_transport, sweeps_needed, token_costs

COUNTS = ((7, 4), (1, 5), (3, 3), (6, 1))  # tokens of the chosen and the rejected response
WIDTH = 9
SETTINGS = [(1.0, 0.2), (0.5, 1.0), (0.05, 0.2), (2.0, 9.0)]


def made_batch(counts: tuple[tuple[int, int], ...] = COUNTS, width: int = WIDTH) -> PreferenceBatch:
    lengths = torch.tensor([pair[side] for side in (0, 1) for pair in counts])
    mask = torch.arange(width) < lengths[:, None]
    rows = RowGroup(
        response_ids=torch.zeros(mask.shape, dtype=torch.long),
        response_mask=mask,
        token_weights={"reward": mask / lengths[:, None]},
        source_lengths=lengths.double(),
        reference_logps=None,
    )
    pairs = len(counts)
    return PreferenceBatch({"main": rows}, torch.ones(pairs), tuple(map(str, range(pairs))), step_pairs=pairs)


def states(batch: PreferenceBatch, size: float = 1.0, shift: float = 0.0, dim: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    mask = batch.main.response_mask
    found = size * torch.randn(*mask.shape, dim, generator=generator, dtype=torch.float64) + shift
    return torch.where(mask.unsqueeze(-1), found, 0.0)


def weights(hidden: Tensor, batch: PreferenceBatch, source: Transport | None = None) -> Tensor:
    stats = TokenStats(hidden.new_zeros(hidden.shape[:2]), hidden=hidden)
    return (source or Transport()).weights(stats, None, batch)


def plainly(chosen: Tensor, rejected: Tensor, reg: float, reg_m: float) -> tuple[Tensor, Tensor]:
    """One pair by the formulas as they stand, without masks: a thousand sweeps over the scalings themselves."""
    cost = (chosen[:, None] - rejected[None]).norm(dim=-1) + 1e-6
    largest = max(cost.max().item(), *(row.norm().item() + 1e-6 for row in [*chosen, *rejected]))
    kernel = torch.exp(-(cost / largest if largest > 1 else cost) / reg)
    u, v = torch.ones(len(chosen)).double(), torch.ones(len(rejected)).double()
    for _ in range(1000):
        u = (1 / (kernel @ v)) ** (reg_m / (reg_m + reg))
        v = (1 / (kernel.T @ u)) ** (reg_m / (reg_m + reg))
    plan = u[:, None] * kernel * v
    plan = plan * min(plan.shape) / plan.sum()
    return plan.sum(1), plan.sum(0)


@pytest.mark.parametrize(("reg", "reg_m"), SETTINGS)
@pytest.mark.parametrize(("size", "shift"), [(1.0, 0.0), (0.05, 0.0), (0.3, 4.0)])
def test_every_pair_has_the_weights_of_its_own_plain_solution(
    reg: float, reg_m: float, size: float, shift: float
) -> None:
    batch = made_batch()
    hidden = states(batch, size, shift)
    found = weights(hidden, batch, Transport(reg, reg_m, tolerance=1e-11))
    expected = torch.zeros_like(found)
    for i, (n, m) in enumerate(COUNTS):
        rows = plainly(hidden[i, :n], hidden[i + len(COUNTS), :m], reg, reg_m)
        expected[i, :n], expected[i + len(COUNTS), :m] = rows
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    shorter = torch.tensor([float(min(pair)) for pair in COUNTS], dtype=torch.float64)
    torch.testing.assert_close(found.sum(-1), torch.cat([shorter, shorter]), rtol=1e-13, atol=0)
    assert found.std(dim=-1).max() > 1e-4, "weights that differ"


@pytest.mark.parametrize(("reg", "reg_m"), SETTINGS)
def test_the_sweeps_reach_the_tolerance_in_weights_and_mass(reg: float, reg_m: float) -> None:
    batch = made_batch()
    mask = batch.main.response_mask.chunk(2)
    costs = token_costs(*states(batch).chunk(2), *mask)

    def solved(sweeps: int) -> Tensor:
        plan = solve_transport(costs, *mask, reg, reg_m, sweeps)
        return torch.cat([plan.chosen[mask[0]], plan.rejected[mask[1]], plan.scale])

    limit = solved(1000)

    def error(sweeps: int) -> float:
        return float((solved(sweeps) / limit - 1).abs().max())

    for tolerance in (1e-3, 1e-6, 1e-9):
        assert error(sweeps_needed(reg, reg_m, tolerance)) <= tolerance
    assert error(1) > 1e-7
    assert Transport().sweep_count == 5


def test_what_stands_off_the_response_never_matters() -> None:
    batch = made_batch()
    hidden = states(batch)
    expected = weights(hidden, batch)
    for garbage in (1e6, math.nan, math.inf):
        spoiled = torch.where(batch.main.response_mask.unsqueeze(-1), hidden, garbage)
        assert torch.equal(weights(spoiled, batch), expected)


def test_a_large_common_component_drowns_nothing() -> None:
    """Distances of 1 between states of norm 1000, in the precision a model gives: float32 products would lose them."""
    batch = made_batch()
    exact = states(batch, shift=400.0).float().double()
    found = weights(exact.float(), batch)
    assert found.dtype == torch.float32
    for i, (n, m) in enumerate(COUNTS):
        chosen, _ = plainly(exact[i, :n], exact[i + len(COUNTS), :m], 1.0, 0.2)
        torch.testing.assert_close(found[i, :n].double(), chosen, rtol=2e-7, atol=0)


def test_precision_is_kept_under_autocast_and_never_below_float32() -> None:
    batch = made_batch()
    hidden = states(batch).bfloat16()
    expected = weights(hidden.double(), batch)
    assert expected.dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        found = weights(hidden, batch)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=0)


def test_the_smallest_entropy_gives_numbers() -> None:
    batch = made_batch()
    found = weights(states(batch, 30.0), batch, Transport(LEAST_REG, 0.02, 1e-6))
    assert found.isfinite().all() and (found.sum(-1) > 0.99).all()


def test_one_pair_without_numbers_leaves_the_others_theirs() -> None:
    batch = made_batch()
    hidden = states(batch)
    expected = weights(hidden, batch)
    hidden[1, 0, 2] = math.nan
    found = weights(hidden, batch)
    assert found[[1, 5]][batch.main.response_mask[[1, 5]]].isnan().all()
    rest = [0, 2, 3, 4, 6, 7]
    assert torch.equal(found[rest], expected[rest])


def test_a_response_without_tokens_takes_nothing_from_the_other() -> None:
    batch = made_batch(((3, 0), (0, 0), (2, 3)))
    found = weights(states(batch), batch)
    assert found.sum(-1).tolist() == pytest.approx([0, 0, 2, 0, 0, 2])


def test_nothing_is_looked_at_on_the_way() -> None:
    """A look would wait for a GPU; on the meta device it is an error."""
    batch = made_batch().to("meta")
    assert weights(torch.zeros(8, WIDTH, 5, device="meta"), batch).shape == (8, WIDTH)


# ---------------------------------------------------------------------------------------------------- as a source


def test_equal_weights_stand_in_until_training() -> None:
    pair = PreferencePair.from_texts([{"role": "user", "content": "q"}], "ab", "abc")
    encoded = {
        side: EncodedResponse([1], list(range(count)), [(i, i + 1) for i in range(count)])
        for side, count in (("chosen", 2), ("rejected", 3))
    }
    found = training_weights(Transport(), None, encoded, pair=pair)
    torch.testing.assert_close(found.rejected, torch.full((3,), 1 / 3))
    assert found.lengths == (2.0, 3.0) and found.coverage == (1.0, 1.0)


def test_without_states_there_are_no_weights() -> None:
    batch = made_batch()
    with pytest.raises(ValueError, match="needs the policy's hidden states"):
        Transport().weights(TokenStats(torch.zeros(8, WIDTH)), None, batch)
