"""Every module imports, and what has to start fast stays light."""

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import attnpo

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "lightning", "transformers", "datasets", "matplotlib", "wandb")


def loaded_after(code: str) -> set[str]:
    """Those of HEAVY that a fresh interpreter has loaded after ``code``."""
    tail = f"\nimport json, sys\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code + tail], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_every_module_imports() -> None:
    names = [module.name for module in pkgutil.walk_packages(attnpo.__path__, "attnpo.")]
    files = [path for path in (ROOT / "attnpo").rglob("*.py") if path != ROOT / "attnpo" / "__init__.py"]
    assert len(names) == len(files), "a folder without __init__.py hides modules from an installation"
    for name in names:
        importlib.import_module(name)


def test_every_module_says_what_it_owns() -> None:
    silent = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "attnpo").rglob("*.py")
        if path.name != "__init__.py" and not path.read_text(encoding="utf-8").lstrip().startswith('"""')
    ]
    assert silent == []


def test_config_is_light() -> None:
    assert loaded_after("import attnpo.config.compose") == set()


def test_composing_is_light_and_checking_loads_no_models() -> None:
    """Errors in a configuration must come before lightning (seconds) and transformers are imported."""
    roots = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    assert roots
    given = {"evaluate": ["benchmark=mt_bench"]}  # which has no default
    configs = f"[compose(n, {given!r}.get(n, ())) for n in {roots!r}]"
    compose = f"from attnpo.config.compose import check, compose\nconfigs = {configs}\n"
    assert loaded_after(compose) == set()
    checked = loaded_after(compose + "for cfg in configs:\n    check(cfg, complete=False)\n")
    assert checked & {"lightning", "transformers", "datasets", "wandb"} == set()


def test_entry_points_are_light() -> None:
    """``--help`` of each has to answer in two seconds."""
    present = [path.stem for path in (ROOT / "attnpo").glob("*.py") if "run_entry" in path.read_text(encoding="utf-8")]
    for name in sorted(set(present)):
        assert loaded_after(f"import attnpo.{name}") == set(), name


def loaded_by_turns(*modules: str) -> dict[str, list[str]]:
    """What of HEAVY (but torch) and torchmetrics a fresh interpreter has loaded after each of ``modules`` in turn."""
    watched = [*(name for name in HEAVY if name != "torch"), "torchmetrics"]
    code = (
        "import importlib, json, sys\nseen = {}\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    seen[name] = [heavy for heavy in {watched!r} if heavy in sys.modules]\n"
        "print(json.dumps(seen))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_commands_do_not_pay_for_what_they_do_not_use() -> None:
    """The modules that do the work, the lightest first; Lightning takes seconds, and what it probes for some more."""
    tables = ["attnpo.lab.reports.report", "attnpo.lab.reports.folder_report", "attnpo.lab.reports.scores"]
    answers = ["attnpo.evaluation.answers.answering", "attnpo.evaluation.evaluating"]
    judges = [
        "attnpo.run.fill_store",
        "attnpo.lab.reports.weight_report",
        "attnpo.lab.reports.passport",
        "tests.conformance.recompute",
    ]
    models = [*answers, *judges, "attnpo.run.resume", "attnpo.run.run"]
    found = loaded_by_turns(*tables, *models)
    assert [found[name] for name in tables] == [[]] * len(tables)
    assert [found[name] for name in models] == [["transformers"]] * len(models)


def test_training_imports_lightning() -> None:
    """The list above would be empty, too, if nothing were found."""
    assert {"lightning", "torchmetrics"} <= set(loaded_by_turns("attnpo.run.training")["attnpo.run.training"])


def test_the_front_and_the_theory_are_light() -> None:
    """``attnpo`` alone and ``--help`` of its commands come within a second."""
    assert loaded_after("import attnpo.__main__\nimport experiments.theory.__main__") == set()
