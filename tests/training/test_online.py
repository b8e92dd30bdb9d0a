"""Online weights through the Lightning module: who sees them, that they carry no gradient, and that they follow."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor

from attnpo.config.compose import validate
from attnpo.data.collate import collate
from attnpo.data.rules import BatchPlan
from attnpo.models.backbone import freeze
from attnpo.models.layouts import padded_layout
from attnpo.models.scored import ScoredLM
from attnpo.objectives.base import PreferenceObjective
from attnpo.objectives.twdpo import OTPO, TwDPO
from attnpo.run.run import run
from attnpo.schema import Kind, ObjectiveOutput, PreferenceBatch, TokenStats, UserError
from attnpo.training.metrics_file import read_metrics
from attnpo.training.module import PreferenceModule
from attnpo.training.optimizer import Optimizer
from attnpo.weights.base import OnlineSource
from attnpo.weights.sources.transport import Transport
from tests.run.worlds import build_world
from tests.training.stored import spoil, stored_data, stored_reference
from tests.training.tiny import Fit, column, make_data, make_examples, tiny_model

PLAN = BatchPlan(8, 4)


@dataclass(frozen=True)
class Norms(OnlineSource):
    """Weights that hold the graph of what they are computed from: shares of the hidden states' norms."""

    kind: ClassVar[Kind] = Kind.DISTRIBUTION
    neutral: ClassVar[bool] = False
    statistics: ClassVar[frozenset[str]] = frozenset({"hidden"})

    def weights(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> Tensor:
        assert policy.hidden is not None and reference is not None
        with torch.enable_grad():
            norms = policy.hidden.norm(dim=-1)
            return norms / norms.sum(-1, keepdim=True)


@dataclass(frozen=True)
class FactorNorms(Norms):
    """The same as factors."""

    kind: ClassVar[Kind] = Kind.FACTOR


@dataclass
class Seen:
    """An objective that keeps the weights it was given."""

    inner: PreferenceObjective
    batches: list[PreferenceBatch]

    @property
    def requires(self) -> frozenset[str]:
        return self.inner.requires

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        self.batches.append(batch)
        return self.inner(policy, reference, batch)


def made(
    source: OnlineSource | None,
    objective: PreferenceObjective | None = None,
    *,
    steps: int = 3,
    live: bool = True,
    lr: float = 1e-2,
    shift: float = 0.0,
) -> PreferenceModule:
    """A module on a tiny policy; ``shift`` moves the policy's weights away from the reference's."""
    policy = tiny_model()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += shift * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    reference = freeze(ScoredLM(tiny_model())) if live else None
    optimizer = Optimizer(lr=lr, warmup=2.0)
    return PreferenceModule(ScoredLM(policy), reference, objective or OTPO(0.5), optimizer, steps, source)


def test_the_source_s_weights_are_what_objective_and_metrics_read(fit: Fit) -> None:
    seen = Seen(OTPO(0.5), [])
    module = made(Transport(), seen)
    given: list[Tensor] = []

    class Look(L.Callback):
        def on_train_batch_start(
            self, trainer: L.Trainer, pl_module: PreferenceModule, batch: PreferenceBatch, batch_idx: int
        ) -> None:
            rows = batch.main
            assert rows.inputs is not None
            with torch.no_grad():
                stats = pl_module.policy(rows.inputs, rows.response_ids, rows.response_mask, {"logps", "hidden"})
            given.append(Transport().weights(stats, None, batch))

    rows = fit(module, make_data(make_examples(16), BatchPlan(8, 8)), steps=2, epochs=1, callbacks=(Look(),))
    trained = [batch.main for batch in seen.batches if len(batch.pair_ids) == 8]
    assert len(trained) == len(given) == 2
    for step, (main, expected) in enumerate(zip(trained, given, strict=True)):
        torch.testing.assert_close(main.token_weights["reward"], expected, rtol=1e-5, atol=1e-7)
        assert main.factors
        assert column(rows, "train/weights/max")[step] == pytest.approx(_pair_means(expected.amax(-1)), rel=1e-5)
    assert column(rows, "val/weights/max")[0] != pytest.approx(1.0), "validation weighs too"


def _pair_means(rows: Tensor) -> float:
    return torch.maximum(*rows.chunk(2)).mean().item()


def test_the_saved_step_holds_the_source_s_weights(fit: Fit, tmp_path: Path) -> None:
    examples = stored_reference(make_examples(8))
    bad = spoil(examples[3], math.nan)
    data = stored_data([*examples[:3], bad, *examples[4:]], PLAN)
    with pytest.raises(UserError, match=r"pair3 \(not finite there: reference log-probs\)"):
        fit(made(Transport(), live=False), data, steps=1, epochs=1, folder=tmp_path)
    saved = torch.load(tmp_path / "nonfinite-step-1.pt", weights_only=True)
    (batches,) = saved["processes"]
    for item in batches:
        main = item["batch"]["groups"]["main"]
        chosen, rejected = main["response_mask"].sum(-1).chunk(2)
        shorter = torch.minimum(chosen, rejected).float()
        sums = main["token_weights"]["reward"].sum(-1)
        torch.testing.assert_close(sums, torch.cat([shorter, shorter]), rtol=1e-6, atol=0)
        assert main["factors"] is True and item["policy"]["hidden"] is None


def test_states_that_are_no_numbers_stop_training_and_are_named(fit: Fit, tmp_path: Path) -> None:
    module = made(Transport(), lr=1e30)
    with pytest.raises(UserError, match=r"step 2 is not finite for 8 of 8 pairs: .*policy log-probs, token weights\)"):
        fit(module, make_data(make_examples(20), PLAN), steps=3, epochs=1)


@pytest.mark.parametrize("source", [Transport(), Norms(), FactorNorms()], ids=lambda source: type(source).__name__)
def test_weights_carry_no_gradient(source: OnlineSource) -> None:
    """A step's gradient is that of the same weights given as constants."""
    batch = collate(make_examples(6), padded_layout, 0, 6)
    objective = OTPO(0.5) if source.kind is Kind.FACTOR else TwDPO(0.5)
    online, constant = made(source, objective, shift=0.05), made(None, objective, shift=0.05)
    scored, _, _, output = online.score(batch)
    weights = scored.main.token_weights["reward"]
    assert not weights.requires_grad and scored.main.factors is (source.kind is Kind.FACTOR)
    output.losses.sum().backward()
    rows = replace(batch.main, token_weights={"reward": weights.clone()}, factors=scored.main.factors)
    constant.score(replace(batch, groups={"main": rows}))[3].losses.sum().backward()
    for one, other in zip(online.policy.parameters(), constant.policy.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


def test_weights_follow_the_policy(fit: Fit) -> None:
    module, batch = made(Transport()), collate(make_examples(6), padded_layout, 0, 6)
    before = module.score(batch)[0].main.token_weights["reward"]
    again = module.score(batch)[0].main.token_weights["reward"]
    assert torch.equal(before, again)
    fit(module, make_data(make_examples(20), PLAN), steps=3, epochs=1)
    after = module.score(batch)[0].main.token_weights["reward"]
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(after.sum(-1), before.sum(-1), rtol=1e-6, atol=0)


def test_how_a_step_is_cut_changes_nothing(fit: Fit) -> None:
    """20 pairs in steps of 8: the short step of 4 too."""
    whole, cut = (
        fit(made(Transport()), make_data(make_examples(20), BatchPlan(8, micro)), steps=3, epochs=1) for micro in (8, 1)
    )
    names = ("loss", "grad_norm", "rewards/margins", "rewards/unweighted/chosen", "weights/max")
    for name in (*(f"train/{name}" for name in names), "val/loss"):
        assert len(column(whole, name)) == (2 if name == "val/loss" else 3)
        assert column(cut, name) == pytest.approx(column(whole, name), rel=2e-5, abs=2e-6), name


# ---------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_world(tmp_path_factory.mktemp("world"))


def test_a_run_trains_with_transport_weights(world: Any, tmp_path: Path) -> None:
    chosen = ("weights=transport", "objective=otpo", "objective.beta=0.5", "optimizer.lr=1e-2", "callbacks=none")
    result = run(world.config(*chosen, "reference=cached", "trainer.validate_every=1"), tmp_path / "run")
    metrics = result.metrics
    assert metrics["first/val/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(metrics["val/loss"] - math.log(2)) > 1e-3
    logged = read_metrics(tmp_path / "run" / "metrics.csv")
    assert "val/rewards/unweighted/chosen" in metrics
    largest = column(logged, "val/weights/max")
    assert len(set(largest)) == len(largest) > 2, "weights that change with every step"
    assert not (world.store / "weights").exists(), "nothing is captured"


def test_a_transform_that_reads_shares_of_them_is_refused(world: Any) -> None:
    chosen = ("weights=transport", "objective=otpo")
    validate(world.composed(*chosen, "transform=mixture"))
    with pytest.raises(UserError, match=r"Smeared.*Transport computes its weights in every step"):
        validate(world.composed(*chosen, "transform=smeared"))
