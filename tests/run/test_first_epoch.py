"""reference=first_epoch: what the live reference says of each pair is kept, stored, and read from the second epoch."""

import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from attnpo.lab.studies.config import FitConfig
from attnpo.run import training
from attnpo.run.combinations import require_reference
from attnpo.run.models import load_reference, reference_table
from attnpo.run.run import run
from attnpo.schema import UserError
from attnpo.training.metrics_file import read_metrics
from tests.run.made import make
from tests.run.worlds import TRAIN, VAL, World
from tests.training.processes import in_two_processes

QUICK = ("weights=uniform", "callbacks=none", "trainer.validate_every=1", "trainer.max_epochs=2")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with every reference that is loaded for training."""
    seen: list[str] = []

    def count_call(*given: object) -> object:
        seen.append("reference")
        return load_reference(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(training, "load_reference", count_call)
    return seen


def losses(folder: Path, name: str) -> list[float]:
    return [row[name] for row in read_metrics(folder / "metrics.csv") if name in row]


def stored(cfg: FitConfig) -> int:
    """The pairs of both splits whose reference log-probabilities lie in the store."""
    made = make(cfg)
    ids = {example.pair_id for part in made.inputs.examples.values() for example in part.examples}
    table = reference_table(made.base, made.cfg.lengths)
    return len(ids) - len(table.missing_pairs(list(ids), ["chosen", "rejected"]))


def test_the_second_epoch_reads_what_the_first_has_stored(
    fresh: World, tmp_path: Path, loads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    run(fresh.config(*QUICK, "reference=live"), tmp_path / "live")
    assert stored(fresh.config(*QUICK)) == 0
    with caplog.at_level(logging.INFO, "attnpo"):
        run(fresh.config(*QUICK, "reference=first_epoch"), tmp_path / "first")
    assert caplog.text.count("all pairs are stored, and the reference model is unloaded") == 1
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        wanted = losses(tmp_path / "live", name)
        assert len(wanted) >= 6
        assert losses(tmp_path / "first", name) == pytest.approx(wanted, rel=2e-5), name
    assert stored(fresh.config(*QUICK)) == TRAIN + VAL
    assert loads == ["reference"] * 2
    run(fresh.config(*QUICK, "reference=first_epoch"), tmp_path / "again")
    run(fresh.config(*QUICK, "reference=cached"), tmp_path / "cached")
    assert len(loads) == 2, "a full store needs no reference model, and a cached one finds it"
    assert losses(tmp_path / "again", "train/loss") == losses(tmp_path / "cached", "train/loss")


def test_the_second_epoch_runs_no_reference_and_holds_none(
    fresh: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else holds on to it: on a GPU its memory is to be free."""
    rows: list[int] = []
    alive: list[tuple[int, bool]] = []
    loaded: list[weakref.ref[object]] = []
    ask: Callable[..., object] = training.PreferenceModule._reference_stats
    train: Callable[..., object] = training.PreferenceModule.training_step

    def load(*given: object) -> object:
        reference = load_reference(*given)  # type: ignore[arg-type]
        loaded.append(weakref.ref(reference))
        return reference

    def count_call(self: object, group: object, requests: object) -> object:
        if self.reference is not None:  # type: ignore[attr-defined]
            rows.append(group.response_ids.shape[0])  # type: ignore[attr-defined]
        return ask(self, group, requests)

    def step(self: object, batch: object, index: int) -> object:
        gc.collect()
        alive.append((self.trainer.current_epoch, loaded[0]() is not None))  # type: ignore[attr-defined]
        return train(self, batch, index)

    monkeypatch.setattr(training, "load_reference", load)
    monkeypatch.setattr(training.PreferenceModule, "_reference_stats", count_call)
    monkeypatch.setattr(training.PreferenceModule, "training_step", step)
    run(fresh.config(*QUICK[:-2], "trainer.validate_every=epoch", QUICK[-1], "reference=first_epoch"), tmp_path / "run")
    # Validation before the first step and after the first epoch, and the first epoch itself; two rows a pair.
    assert sum(rows) == 2 * (VAL + TRAIN + VAL)
    assert set(alive) == {(0, True), (1, False)}


def test_a_run_that_ends_early_keeps_what_it_has_seen(fresh: World, tmp_path: Path, loads: list[str]) -> None:
    run(fresh.config(*QUICK[:-1], "trainer.max_steps=2", "reference=first_epoch"), tmp_path / "run")
    assert stored(fresh.config(*QUICK)) == 8 + VAL
    run(fresh.config(*QUICK[:-1], "trainer.max_steps=2", "reference=first_epoch"), tmp_path / "more")
    assert len(loads) == 2, "four pairs are lacking"


def test_an_objective_that_needs_the_reference_itself_is_refused(world: World) -> None:
    cfg = world.config("weights=uniform", "objective=tdpo2")
    with pytest.raises(UserError, match=r"reference=first_epoch stores only the log-probs"):
        require_reference("first_epoch", cfg.objective)


def test_two_sharded_processes_share_what_each_has_seen(fresh: World, tmp_path: Path) -> None:
    """Started by srun, which says that there are two; Lightning alone insists on --ntasks-per-node."""
    run(fresh.config(*QUICK, "reference=live"), tmp_path / "one")
    more = ["experiment=none", "name=two", f"output={tmp_path}", "trainer.strategy=fsdp"]
    overrides = fresh.overrides(*QUICK, "reference=first_epoch", "batch.micro=1", *more)
    codes, output = in_two_processes(["-m", "attnpo.fit", *overrides], tmp_path, slurm=True)
    assert codes == [0, 0], output[-6000:]
    assert "all pairs are stored, and the reference model is unloaded" in output
    assert losses(tmp_path / "two", "train/loss") == pytest.approx(losses(tmp_path / "one", "train/loss"), rel=2e-5)
    assert stored(fresh.config(*QUICK)) == TRAIN + VAL
