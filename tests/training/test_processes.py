"""Two processes train like one: DDP and FSDP2, over gloo on a CPU."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from attnpo.data.rules import BatchPlan
from attnpo.training.checkpoint_folders import read_checkpoint_info
from attnpo.training.metrics_file import read_metrics
from tests.training.processes import in_two_processes
from tests.training.several import CASES, STOP, Case, bad_pair, run_case
from tests.training.stored import epoch_order
from tests.training.tiny import Rows, column, make_module

SEVERAL = Path(__file__).with_name("several.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of every case, run by the same two processes one after the other."""
    folder = tmp_path_factory.mktemp("two")
    codes, output = in_two_processes([str(SEVERAL), str(folder)], folder)
    assert codes == [0, 0], output[-8000:]
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], Rows]:
    """What a single process gives, by number of pairs and whether a layer alone is trained."""
    place = tmp_path_factory.mktemp("one")
    return {
        (pairs, part): run_case(Case("auto", 8, pairs, part=part), place, place / f"{pairs}{part}", devices=1)
        for pairs, part in ((20, False), (21, False), (20, True))
    }


COMPARED = (
    *("train/loss", "train/grad_norm", "train/rewards/margins", "train/rewards/accuracies", "train/lr", "val/loss"),
)
UNBROKEN = [
    name
    for name, case in CASES.items()
    if case.resumes is None and case.pairs != 17 and not case.bad and not case.poison
]
RESUMED = [name for name, case in CASES.items() if case.resumes is not None]


@pytest.mark.parametrize("name", UNBROKEN)
def test_two_processes_give_the_numbers_of_one(folder: Path, one: dict[tuple[int, bool], Rows], name: str) -> None:
    rows, expected = read_metrics(folder / name / "metrics.csv"), one[CASES[name].pairs, CASES[name].part]
    assert len(column(rows, "train/loss")) == 6 and len(column(rows, "val/loss")) == 7
    assert max(column(expected, "train/grad_norm")) > 0.1, "clipping at 0.05 must be at work"
    for metric in COMPARED:
        assert column(rows, metric) == pytest.approx(column(expected, metric), rel=2e-5, abs=2e-5), metric
    assert tokens_per_pair(rows) == pytest.approx(tokens_per_pair(expected), rel=1e-5), "those of both processes"


def tokens_per_pair(rows: Rows) -> list[float]:
    tokens, pairs = column(rows, "train/tokens_per_s"), column(rows, "train/pairs_per_s")
    return [token / pair for token, pair in zip(tokens, pairs, strict=True)]


def test_a_pair_that_two_processes_cannot_share_is_left_out(folder: Path) -> None:
    """17 pairs are two steps and one pair per epoch, not three; training still ends with a validation."""
    rows = read_metrics(folder / "ddp, one pair left over" / "metrics.csv")
    assert [row["step"] for row in rows if "train/loss" in row] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "val/loss" in row] == [0, 1, 2, 3, 4]
    recipe = make_module(4).recipe
    expected = [recipe.lr * recipe.lr_factor(step, 4) for step in range(4)]
    assert column(rows, "train/lr") == pytest.approx(expected), "the cosine ends with the fourth step"
    assert recipe.lr_factor(4, 4) == 0.0


@pytest.mark.parametrize("name", RESUMED)
def test_a_sharded_run_resumes(folder: Path, one: dict[tuple[int, bool], Rows], name: str) -> None:
    rows, expected = read_metrics(folder / name / "metrics.csv"), one[20, CASES[name].part]
    for metric in COMPARED[:-1]:
        assert column(rows, metric) == pytest.approx(column(expected, metric)[STOP:], rel=2e-5, abs=2e-5), metric
    assert column(rows, "val/loss")[-1] == pytest.approx(column(expected, "val/loss")[-1], abs=2e-5)
    unbroken, resumed = (torch.load(folder / case / "final.pt") for case in (str(CASES[name].resumes), name))
    assert all(torch.allclose(unbroken[key], value, atol=1e-6) for key, value in resumed.items())


def test_a_sharded_checkpoint_holds_what_is_trained(folder: Path) -> None:
    """The second layer alone, whole."""
    state = torch.load(folder / "fsdp, a layer" / f"{STOP}.ckpt", weights_only=True)["state_dict"]
    final = torch.load(folder / "fsdp, a layer" / "final.pt", weights_only=True)
    assert len(state) == 9 and all(".layers.1." in name for name in state)
    assert all(value.shape == final[name.removeprefix("policy.model.")].shape for name, value in state.items())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.bad])
def test_every_process_stops_and_names_the_pair_that_one_has(folder: Path, name: str) -> None:
    place, case = folder / name, CASES[name]
    bad = bad_pair(case, BatchPlan(8, case.micro))
    texts = [(place / f"error{rank}.txt").read_text() for rank in range(2)]
    assert texts[0] == texts[1]
    assert f"step 2 is not finite for 1 of 8 pairs: pair{bad} (not finite there: reference log-probs)" in texts[0]
    saved = torch.load(place / "nonfinite-step-2.pt", weights_only=True)
    ids = [[pair for batch in share for pair in batch["pair_ids"]] for share in saved["processes"]]
    step = [f"pair{i}" for i in epoch_order(case.pairs, BatchPlan(8, case.micro))[8:16]]
    assert ids == [step[:4], step[4:]] and f"pair{bad}" in ids[1] and saved["pairs"] == [f"pair{bad}"]
    assert [list(names) != [] for names in saved["gradients"]] == [True, True], "the gradient is of both processes"


def test_every_process_stops_for_weights_that_one_holds(folder: Path) -> None:
    """Before the checkpoint of that step takes the place of the one before."""
    place = folder / "fsdp, poisoned"
    texts = [(place / f"error{rank}.txt").read_text() for rank in range(2)]
    assert texts[0] == texts[1]
    assert f"the weights are not finite after optimiser step {STOP}: 1 of " in texts[0] and "lm_head" in texts[0]
    assert read_checkpoint_info(place / "last")["step"] == STOP - 1
    assert f"the last saved step is {STOP - 1}, in {place / 'last'}" in texts[0]


def test_a_sharded_policy_is_exported_whole(folder: Path) -> None:
    """``last/`` of a sharded run is a folder like any other: whole weights, and a state file without shards."""
    place = folder / "fsdp, one pair at a time"
    final = torch.load(place / "final.pt", weights_only=True)
    loaded = AutoModelForCausalLM.from_pretrained(place / "last").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in final.items())
    assert set(load_file(place / "last" / "model.safetensors")) <= set(final)
    assert (place / "last" / "state.ckpt").is_file()
    state = torch.load(place / "last" / "state.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(state[f"policy.model.{name}"], value) for name, value in final.items())


def test_the_reference_goes_to_the_device_of_its_process() -> None:
    """Lightning moves the module itself only after ``setup``, so ``module.device`` is not yet the process's own."""
    module = make_module(1)
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("meta")))  # type: ignore[assignment]
    module.setup("fit")
    assert module.reference is not None
    assert {parameter.device.type for parameter in module.reference.parameters()} == {"meta"}
