"""Commands as a reader pastes them: into a shell in which nothing is set and no environment is active.

Of a document, the shell has run the one line by which the document activates the environment, and that line comes
before the first command that needs it. What the program prints runs without that line.
"""

import logging
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from attnpo import __main__ as front
from attnpo import fit
from attnpo.cli.entry import run_entry
from attnpo.cli.help import CommandParser
from attnpo.cli.terminal import rewrite_commands
from attnpo.config.compose import CONFIG_DIR, list_groups
from tests.docs.commands import HEADED, NOTEBOOKS, PAGES, ROOT, Command, of_header, of_line, of_markdown, of_notebook
from tests.docs.test_commands import ENTRIES
from tests.run.worlds import World, build_world

ACTIVATE = ". .venv/bin/activate"
BARE = "/usr/bin:/bin"
# Programs that the environment does not bring, and words of the shell.
OUTSIDE = {"make", "git", "vllm", "srun", "sbatch", "python3.11", "export", "cd"}
FIND = "import sys; from importlib.util import find_spec; print(*[m for m in sys.argv[1:] if find_spec(m) is None])"

pytestmark = pytest.mark.skipif(not (ROOT / ACTIVATE[2:]).is_file(), reason="no .venv; `make setup` builds it")


def shell(home: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """Runs lines in a shell of their own in the checkout; what the tests' own processes cache is shared."""
    shared = {name: os.environ[name] for name in ("ATTNPO_CACHE", "OMP_NUM_THREADS") if name in os.environ}
    environment = {"PATH": BARE, "HOME": str(home), **shared}
    return subprocess.run(
        ["sh", "-c", "\n".join(lines)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def lacking(texts: Sequence[str], home: Path, *begun: str) -> set[str]:
    """Returns the programs, modules and files of commands that a shell does not find after the lines ``begun``."""
    commands = [words for text in texts if (words := Command(text, "").words)[0] not in {*OUTSIDE, "."}]
    tried = [f"command -v {shlex.quote(name)} >&2 || echo {shlex.quote(name)}" for name in {c[0] for c in commands}]
    modules: dict[str, set[str]] = {}
    for words in commands:
        if "-m" in words[:-1]:
            name = words[words.index("-m") + 1]
            whole = name.startswith(("attnpo.", "experiments."))
            found = modules.setdefault(str(Path(words[0]).with_name("python")), set())
            found.add(name if whole else name.partition(".")[0])
    tried += [shlex.join([python, "-c", FIND, *sorted(names)]) for python, names in modules.items()]
    scripts = {words[1] for words in commands if words[0] == "python" and words[1].endswith(".py")}
    return {*shell(home, *begun, *tried).stdout.split(), *(name for name in scripts if not (ROOT / name).is_file())}


def test_the_commands_of_a_page_run_after_the_line_that_it_prints_first(tmp_path: Path) -> None:
    """Those in configurations and notebooks run after the README's."""
    early: dict[str, Path] = {}
    late = {text: path for path in HEADED for text in of_header(path)}
    late |= {text: path for path in NOTEBOOKS for text in of_notebook(path)}
    assert ACTIVATE in (ROOT / "README.md").read_text(encoding="utf-8") and len(late) > 50
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        before, line, _ = text.partition(ACTIVATE)
        first = of_markdown(before + "\n```" if line else text)
        early |= {one: page for one in first if Command(one, "").words[0] not in OUTSIDE}
        late |= {one: page for one in of_markdown(text)} if line else {}
    for found, *begun in ((early,), (late, ACTIVATE)):
        names = lacking(list(found), tmp_path, *begun)
        assert names == set(), {path for text, path in found.items() if any(name in text for name in names)}


def test_the_set_up_ends_with_how_to_activate(tmp_path: Path) -> None:
    """As make would print it: the recipe of the environment, not run."""
    recipe = shell(tmp_path, "make -n -W setup.cfg setup").stdout
    assert recipe.rstrip().splitlines()[-1].strip().startswith("echo ") and ACTIVATE in recipe.splitlines()[-1]


# ------------------------------------------------------------------------------------------------ of the program


@pytest.fixture
def inactive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process print commands for a shell in which no environment is active."""
    monkeypatch.setenv("PATH", BARE)
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("inactive")
def test_commands_of_the_help_find_their_programs(tmp_path: Path) -> None:
    helps = {name: import_module(f"attnpo.{name}") for name in sorted(ENTRIES)}
    texts = [
        CommandParser(name, "", module.EXAMPLES, None).help_text(CONFIG_DIR / f"{name}.yaml", list_groups())
        for name, module in helps.items()
    ]
    texts += [front.usage_text(), rewrite_commands(import_module("tests.conformance.__main__").EPILOG)]
    lines = [line.strip().removeprefix("usage: ") for text in texts for line in text.splitlines()]
    found = [command for line in lines for command in of_line(line)]
    assert len(found) > 30 and {command.split()[0].rpartition("/")[2] for command in found} == {"python", "torchrun"}
    assert lacking(found, tmp_path) == set()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("a world"))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of options, with a blank in its name."""
    folder = tmp_path / "own options"
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "plain.yaml").write_text("_target_: attnpo.weights.sources.uniform.Uniform\n")
    return folder


@pytest.mark.usefixtures("inactive")
def test_what_a_run_prints_runs(world: World, own: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With options of its own from ``--config-dir``: the table, another seed, and the same with other weights."""
    words = world.overrides("weights=plain", "trainer.max_steps=1", "callbacks=none", f"output={tmp_path / 'out put'}")
    with caplog.at_level(logging.INFO):
        assert run_entry(fit.main, "fit", [*words, "--config-dir", str(own)], "", "") == 0
    said = [record.getMessage() for record in caplog.records]
    printed = [line.strip() for line in said if re.match(r"  \S.* -m attnpo\.", line)]
    assert [shlex.split(line)[2] for line in printed] == ["attnpo.report", "attnpo.fit", "attnpo.fit"]
    for line in (f"{printed[0]} --cfg what", f"{printed[1]} --cfg seed", printed[2]):
        done = shell(tmp_path, line)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert len(list((tmp_path / "out put").glob("*/result.json"))) == 2


@pytest.mark.usefixtures("inactive")
def test_what_a_report_says_it_was_asked_runs(own: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first line of a report names ``--config-dir`` too: without it the option is not found."""
    report = import_module("attnpo.report")
    with caplog.at_level(logging.INFO):
        run_entry(
            report.main, "report", ["weights=plain", "nothing", "--config-dir", str(own)], "", "", positional="what"
        )
    (line,) = [one.getMessage() for one in caplog.records if "-m attnpo.report" in one.getMessage()]
    done = shell(tmp_path, f"{line} --cfg weights")
    assert done.returncode == 0 and "Uniform" in done.stdout, done.stderr
