"""The commands as a user starts them: help and errors come fast, configurations are shown without running anything."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[1]
ENTRY_POINTS = sorted(
    path.stem for path in (ROOT / "attnpo").glob("*.py") if "run_entry(main" in path.read_text(encoding="utf-8")
)
SLOW_PACKAGES = ("lightning", "transformers", "datasets", "wandb", "matplotlib")
# Help must come within two seconds on an idle machine; the test's machine may be busy.
PATIENCE = 8.0


def start(*arguments: str, listing: bool = False) -> subprocess.CompletedProcess[str]:
    """A finished process of ``python -m``; with ``listing`` its errors hold the modules it imported."""
    options = ["-X", "importtime"] if listing else []
    return subprocess.run(
        [sys.executable, *options, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def imported(errors: str) -> set[str]:
    """The packages named in the listing of ``-X importtime``."""
    lines = [line for line in errors.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}


def test_there_are_entry_points() -> None:
    assert {"fit", "weigh"} <= set(ENTRY_POINTS)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_help_comes_at_once(name: str) -> None:
    begin = time.monotonic()
    done = start(f"attnpo.{name}", "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert f"python -m attnpo.{name}" in done.stdout
    assert time.monotonic() - begin < PATIENCE


def test_help_lists_groups_and_an_example() -> None:
    text = start("attnpo.fit", "--help").stdout
    for line in ("setting=", "weights=attention | uniform", "experiment=layer_sweep", "example:"):
        assert line in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("weights.layr=2", "did you mean weights.layer?"),
        ("weights=attension", "Available options in 'weights': attention, uniform"),
        ("weights.layer=2.5", "weights.layer: expected int or str, got 2.5"),
        ("optimizer.lr=fast", "optimizer.lr: expected float, got 'fast'"),
        ("trainer.validate_every=0", "trainer.validate_every must be at least 1"),
        ("layer_sweep", "expected GROUP=OPTION or KEY=VALUE"),
    ],
)
def test_a_wrong_word_is_refused_before_anything_heavy_is_loaded(override: str, message: str) -> None:
    done = start("attnpo.fit", override, listing=True)
    errors = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("import time:"))
    assert done.returncode == 2 and done.stdout == ""
    assert errors.startswith("error: ") and message in errors and "Traceback" not in errors
    loaded = imported(done.stderr)
    assert "hydra" in loaded, "the listing must show what was imported"
    assert loaded & set(SLOW_PACKAGES) == set()


@pytest.mark.parametrize("name", ["fit", "weigh"])
def test_paths_that_must_be_given_are_asked_for(name: str) -> None:
    done = start(f"attnpo.{name}", "setting=real_smoke")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "model.path: required; give model.path=VALUE" in done.stderr
    assert "data.path: required; give data.path=VALUE" in done.stderr


def test_the_configuration_is_shown_and_nothing_is_run(tmp_path: Path) -> None:
    done = start("attnpo.fit", "--cfg", "job", "seed=7", f"output={tmp_path / 'out'}", listing=True)
    shown = OmegaConf.create(done.stdout)
    assert done.returncode == 0
    assert (shown.seed, shown.objective.beta, shown.weights.layer) == (7, 0.3, 1)
    assert shown.study.name == "quickstart"
    assert not (tmp_path / "out").exists()
    assert imported(done.stderr) & {*SLOW_PACKAGES, "torch"} == set()


def test_fit_and_weigh_compose_the_same() -> None:
    """The same overrides must name the same weights."""
    shown = [
        start(f"attnpo.{name}", "--cfg", "job", "setting=real_smoke", "judge=pairwise") for name in ("fit", "weigh")
    ]
    assert [done.returncode for done in shown] == [0, 0]
    assert shown[0].stdout == shown[1].stdout
