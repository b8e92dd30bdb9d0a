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


def loaded_after(*steps: str) -> list[set[str]]:
    """Those of HEAVY, and torchmetrics, that a fresh interpreter has loaded after each step of code."""
    code = (
        "import json, sys\nseen, names = [], {}\n"
        f"for step in {steps!r}:\n"
        "    exec(step, names)\n"
        f"    seen.append([heavy for heavy in {(*HEAVY, 'torchmetrics')!r} if heavy in sys.modules])\n"
        "print(json.dumps(seen))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [set(found) for found in json.loads(done.stdout.splitlines()[-1])]


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


def test_what_has_to_start_fast_is_light() -> None:
    """Loads nothing heavy for ``--help``, which answers in two seconds, and composes without torch.

    Errors in a configuration come before lightning (seconds) and transformers are imported.
    """
    present = [path.stem for path in (ROOT / "attnpo").glob("*.py") if "run_entry" in path.read_text(encoding="utf-8")]
    roots = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    given = {"evaluate": ["benchmark=mt_bench"]}  # which has no default
    assert roots and present
    *light, composed, checked = loaded_after(
        "import attnpo.config.compose",
        *(f"import attnpo.{name}" for name in ("__main__", *sorted(present))),
        "import experiments.theory.__main__",
        "from attnpo.config.compose import validate, compose\n"
        f"configs = [compose(n, {given!r}.get(n, ())) for n in {roots!r}]",
        "for cfg in configs:\n    validate(cfg, complete=False)\n",
    )
    assert light == [set()] * len(light) and composed == set()
    assert checked & {"lightning", "transformers", "datasets", "wandb"} == set()


def test_commands_do_not_pay_for_what_they_do_not_use() -> None:
    """The modules that do the work, the lightest first; Lightning takes seconds, and what it probes for some more."""
    tables = ["attnpo.lab.reports.report", "attnpo.lab.reports.folder_report", "attnpo.lab.reports.scores"]
    tables += [f"attnpo.evaluation.{name}" for name in ("answers", "lm_eval_tasks", "pairs")]
    answers = ["attnpo.evaluation.evaluating"]
    judges = [
        "attnpo.run.weight_export",
        "attnpo.lab.reports.weight_report",
        "attnpo.lab.reports.passport",
        "tests.conformance.recompute",
    ]
    models = [*answers, *judges, "attnpo.run.resume", "attnpo.run.run"]
    *found, trained = loaded_after(*(f"import {name}" for name in (*tables, *models, "attnpo.run.training")))
    assert all(loaded <= {"torch"} for loaded in found[: len(tables)])
    assert all(loaded <= {"torch", "transformers"} for loaded in found[len(tables) :])
    assert {"lightning", "torchmetrics"} <= trained, "or the lists would be empty if nothing were found"
