"""Shared fixtures."""

import gc
import os
import sys
from pathlib import Path

import hypothesis
import jaxtyping
import pytest

from tests.bad_input.table import pytest_terminal_summary as pytest_terminal_summary

# The process that starts the workers of ``-n`` runs no test.
WORKERS = dict(zip(sys.argv, sys.argv[1:], strict=False)).get("-n", "0")
RUNS = "PYTEST_XDIST_WORKER" in os.environ or WORKERS == "0"
# Three processes read the tests, and these start hundreds of short commands: none compiles the sources anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if RUNS:
    gc.disable()  # until the tests are collected: all that is made here stays
    # What a checked module imports first, jaxtyping's hook compiles anew and keeps under a name of its own, libraries
    # too. These come first, as they were compiled when they were installed.
    import lightning.pytorch  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch
    import torchmetrics.text  # noqa: F401
    import transformers.modeling_utils  # noqa: F401

    torch.set_num_threads(1)
# A slow example is a busy machine, no fault.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

os.environ.pop("COLUMNS", None)  # readline in the process that starts the workers hands them one of its own
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("ATTNPO_ALLOW_TARGETS", "tests")  # components that tests define
# W&B's reports about itself go through threads that try the network; its service may start late on a busy machine.
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
os.environ.setdefault("WANDB__SERVICE_WAIT", "300")
# Commands are printed as a shell with this environment active runs them; tests/docs/test_bare_shell.py has none active.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """Hides the GPUs, which ``-m gpu`` alone asks for: no other test takes one."""
    if "gpu" not in str(config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of a GPU out, unless ``-m gpu`` asks for them: here they could see none, and only be skipped."""
    if "gpu" not in str(config.option.markexpr):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(scope="session")
def vectors() -> Path:
    """Returns the golden records of the repository (``tests.conformance.drawn`` draws their models)."""
    return ROOT / "tests" / "conformance" / "vectors"


@pytest.fixture(scope="session")
def paper_tables() -> Path:
    """Returns the numbers of the paper's tables as printed."""
    return ROOT / "tests" / "paper_tables"


@pytest.fixture(scope="session")
def babbler() -> Path:
    """A small Llama drawn from a seed, with a tokenizer that has no chat template."""
    from tests.conformance.drawn import model_folder

    return model_folder(ROOT / "tests" / "models" / "babbler")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Returns the folder of others' data and models beside the checkout; tests of it skip without it."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the development data folder {folder.name}/ beside the checkout")
    return folder


# Where annotated shapes are checked at each call: in tests of the rooms that compute with tensors, and of whole runs.
# A sixth of the time of the others went into checking the same calls again.
CHECKED = (
    *("conformance/", "evaluation/test_", "judge/", "lab/analysis/", "lab/testbed/", "models/", "objectives/"),
    *("theory/", "training/", "weights/", "run/test_models.py", "run/test_run.py", "run/test_show.py"),
    *("lab/reports/test_passport_numbers.py", "gains/test_prediction.py", "test_weigher.py"),
)


@pytest.fixture(scope="module", autouse=True)
def _shapes(request: pytest.FixtureRequest) -> None:
    where = request.path.relative_to(ROOT / "tests").as_posix()
    jaxtyping.config.update("jaxtyping_disable", not where.startswith(CHECKED))


def pytest_collection_finish() -> None:
    """Leaves what is imported by now out of each later garbage collection: millions of objects that stay.

    And looks for garbage less often: a test leaves little, in a process of gigabytes.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
