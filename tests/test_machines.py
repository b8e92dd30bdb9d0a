"""Suite and set-up on other machines: another Python, a GPU, libraries that warn when they are compiled."""

import os
import subprocess
import warnings
from pathlib import Path

import pytest
import torch

from attnpo.training.settings import TrainerSettings
from attnpo.training.trainer import make_accelerator
from tests.conftest import ROOT


def make_python(path: Path, version: str) -> Path:
    """A program that says it is a version of Python."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return path


def run_make(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "PYTHON")}
    return subprocess.run(
        ["make", *words], cwd=ROOT, env={**environ, **variables}, capture_output=True, text=True, check=False
    )


def test_an_environment_of_another_python_is_refused_by_name(tmp_path: Path) -> None:
    make_python(tmp_path / "old" / "bin" / "python", "3.11")
    newer, venv = make_python(tmp_path / "python3.12", "3.12"), f"VENV={tmp_path / 'old'}"
    for done in (run_make("help", venv, f"PYTHON={newer}"), run_make("help", venv, PYTHON=str(newer))):
        assert (
            done.returncode == 2 and f"{tmp_path / 'old'} holds Python 3.11 and PYTHON={newer} is 3.12" in done.stderr
        )
        assert "VENV=.venv-3.12" in done.stderr
    same = make_python(tmp_path / "python3.11", "3.11")
    for words in ((venv,), (venv, f"PYTHON={same}"), (f"VENV={tmp_path / 'new'}", f"PYTHON={newer}")):
        done = run_make("help", *words)
        assert done.returncode == 0, done.stderr


def test_a_library_that_is_compiled_late_ends_no_test() -> None:
    """Other warnings do."""
    for text in (r"invalid escape sequence '\.'", r'"\." is an invalid escape sequence. Such sequences will not work'):
        warnings.warn_explicit(text, SyntaxWarning, "torchao/quantization/some.py", 1)
    with pytest.raises(SyntaxWarning):
        warnings.warn_explicit('"is" with a literal', SyntaxWarning, "torchao/quantization/some.py", 1)


def test_no_test_takes_a_gpu_unasked(pytestconfig: pytest.Config) -> None:
    if "gpu" in str(pytestconfig.option.markexpr):
        pytest.skip("GPUs were asked for with -m gpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not torch.cuda.is_available()


def test_auto_is_the_cpu_where_there_is_no_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own would take Apple's GPU, on which nothing here has been tried."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert make_accelerator(TrainerSettings(max_epochs=1, accelerator="auto")) == "cpu"
    assert make_accelerator(TrainerSettings(max_epochs=1, accelerator="mps")) == "mps"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert make_accelerator(TrainerSettings(max_epochs=1, accelerator="auto")) == "auto"
