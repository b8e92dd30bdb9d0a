"""Two processes train like one: DDP and FSDP2, over gloo on a CPU."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from attnpo.training.metrics_file import read_metrics
from tests.training.processes import in_two_processes
from tests.training.several import CASES, STOP, Case, run_case
from tests.training.tiny import make_module

SEVERAL = Path(__file__).with_name("several.py")

Rows = list[dict[str, float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of every case, run by the same two processes one after the other."""
    folder = tmp_path_factory.mktemp("two")
    codes, output = in_two_processes([str(SEVERAL), str(folder)], folder)
    assert codes == [0, 0], output[-8000:]
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Rows]:
    """What a single process gives, by number of pairs."""
    place = tmp_path_factory.mktemp("one")
    return {pairs: run_case(Case("auto", 8, pairs), place, place / str(pairs), devices=1) for pairs in (20, 21)}


def column(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


COMPARED = ("train/loss", "train/grad_norm", "train/rewards/margins", "train/rewards/accuracies", "val/loss")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.resumes is None and case.pairs != 17])
def test_two_processes_give_the_numbers_of_one(folder: Path, one: dict[int, Rows], name: str) -> None:
    rows, expected = read_metrics(folder / name / "metrics.csv"), one[CASES[name].pairs]
    assert len(column(rows, "train/loss")) == 6 and len(column(rows, "val/loss")) == 7
    assert max(column(expected, "train/grad_norm")) > 0.1, "clipping at 0.05 must be at work"
    for metric in COMPARED:
        assert column(rows, metric) == pytest.approx(column(expected, metric), rel=2e-5, abs=2e-5), metric


@pytest.mark.slow
def test_a_pair_that_two_processes_cannot_share_is_left_out(folder: Path) -> None:
    """17 pairs are two steps and one pair per epoch, not three; training still ends with a validation."""
    rows = read_metrics(folder / "ddp, one pair left over" / "metrics.csv")
    assert [row["step"] for row in rows if "train/loss" in row] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "val/loss" in row] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_a_sharded_run_resumes(folder: Path, one: dict[int, Rows]) -> None:
    rows = read_metrics(folder / "fsdp, resumed" / "metrics.csv")
    for metric in COMPARED[:-1]:
        assert column(rows, metric) == pytest.approx(column(one[20], metric)[STOP:], rel=2e-5, abs=2e-5), metric
    assert column(rows, "val/loss")[-1] == pytest.approx(column(one[20], "val/loss")[-1], abs=2e-5)


@pytest.mark.slow
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
