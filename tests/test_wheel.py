"""A wheel built from an sdist works from any folder, with its configurations and templates inside."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("attnpo", "configs", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
SDIST = "from setuptools import build_meta; build_meta.build_sdist('dist')"


def done(*command: str | Path, cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """A finished process that knows of no checkout; its environment is active."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env["PATH"] = f"{Path(command[0]).parent}{os.pathsep}{env['PATH']}"
    finished = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == status, finished.stderr
    return finished


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built, without a network, from an sdist of what the checkout holds."""
    folder = tmp_path_factory.mktemp("wheel")
    (source := folder / "checkout").mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    done(sys.executable, "-c", SDIST, cwd=source)
    (archive,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "sdist", filter="data")
    (unpacked,) = (folder / "sdist").iterdir()
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done(*pip, "-w", folder, unpacked, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds the wheel, and what it needs from the one that runs this test."""
    folder = tmp_path_factory.mktemp("environment")
    done(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    install = ["install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check"]
    done(sys.executable, "-m", "pip", "--python", python, *install, wheel, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A plain line: the hooks by which an editable installation leads to a checkout are not run.
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    return folder / "bin"


def test_the_wheel_holds_every_configuration_and_template_and_nothing_beside_the_package(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    configs = {f"attnpo/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*") if path.is_file()}
    templates = {str(path.relative_to(ROOT)) for path in (ROOT / "attnpo").glob("**/templates/*")}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "attnpo").rglob("*.py")}
    assert len(configs) > 100 and templates
    assert configs | templates | modules | {"attnpo/py.typed"} <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"attnpo"}


def test_the_installed_command_works_from_another_folder(installed: Path, tmp_path: Path) -> None:
    where = done(installed / "python", "-c", "import attnpo; print(attnpo.__file__)", cwd=tmp_path).stdout
    assert Path(where).is_relative_to(installed.parent), "the test must not find the checkout"
    commands = done(installed / "attnpo", cwd=tmp_path).stdout
    assert "  attnpo fit\n" in commands and "python -m" not in commands
    help_text = done(installed / "attnpo", "fit", "--help", cwd=tmp_path).stdout
    assert "usage: attnpo fit " in help_text and "weights=attention | " in help_text and "python -m" not in help_text
    shown = done(installed / "attnpo", "fit", "--cfg", "judge.template_file", cwd=tmp_path).stdout
    assert shown == "judge/testbed.txt\n"
    whole = done(installed / "attnpo", "fit", "--cfg", "job", cwd=tmp_path).stdout
    assert whole == done(sys.executable, "-m", "attnpo.fit", "--cfg", "job", cwd=ROOT).stdout
    assert list(tmp_path.iterdir()) == []


def test_the_installed_command_writes_pages(installed: Path, tmp_path: Path) -> None:
    """Its templates lie in the package."""
    result = {"steps": 12, "seconds": {"all": 2.5}, "metrics": {"val/loss": 0.5}, "inputs": {}, "truth": None}
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "result.json").write_text(json.dumps(result), encoding="utf-8")
    finished = done(installed / "attnpo", "report", "run", "first", cwd=tmp_path)
    assert " attnpo report run first" in finished.stderr
    (page,) = tmp_path.glob("outputs/*/report.html")
    assert "<table" in page.read_text(encoding="utf-8")


def test_the_installed_command_refuses_in_its_own_words(installed: Path, tmp_path: Path) -> None:
    refused = done(installed / "attnpo", "fti", cwd=tmp_path, status=2).stderr
    assert refused.startswith("error: fti: no such command; did you mean fit?")
    refused = done(installed / "attnpo", "weights=uniform", cwd=tmp_path, status=2).stderr
    assert "`attnpo fit weights=uniform`" in refused
