"""Every command that the documents name is run on a tiny world, or composed and checked where that cannot be.

The tables below say which, with the reason. A command that fits none of them fails.
"""

import ast
import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from attnpo.cli.entry import run_entry
from attnpo.config.compose import CONFIG_DIR, RootConfig, compose, expand_sweep, parse, validate
from attnpo.lab.studies.arms import make_composer
from attnpo.run import combinations as settings
from attnpo.schema import digest
from tests.docs.commands import FENCE, PAGES, ROOT, Command, every_command
from tests.run.worlds import World, build_world

COMMANDS = every_command()
ENTRIES = {"fit", "weigh", "show", "generate", "pair", "evaluate", "report"}
COMPOSED_ENTRIES = {path.stem for path in CONFIG_DIR.glob("*.yaml")}

# ------------------------------------------------------------------------------------------------ what is run where

# Commands of attnpo that are composed and checked, and not run, by what they hold.
NOT_RUN = {
    r"setting=(llama3|mistral)|hardware=": "GPU: models of 7 and 8 billion parameters",
    r"meta-llama/": "hub: a model of 8 billion parameters",
    r"^(torchrun|srun) ": "cluster: several processes (tests/run/test_launched.py starts two)",
    r"benchmark=(mt_bench|alpaca_eval|arena_hard)": "API: a served grader, and the benchmark's own files",
    r"benchmark=(lm_eval|ifeval)": "hub: the tasks' data sets",
    r"(answering|grader)=openai": "API: a server",
    r"experiment=(?!none|quickstart|NAME)\w": "long: hours, more than a hundred runs",
    r"prepare=(clean|long)": "long: a base model of its own",
    r"judge=other": "hub: another model than the run's",
    r" -m$": "long: a grid of runs (tests/test_sweeps.py reads every job)",
    r"logger=wandb": "API: an account (tests/run/test_report.py runs it offline)",
}
# Commands that another test runs, which must be there.
ELSEWHERE = {
    r"experiments\.gains\b": "tests/gains/test_gains.py::test_the_committed_cases_are_whole_and_give_the_pages_table",
    r"attnpo\.report scores\b": "tests/lab/reports/test_scores.py::test_printed_numbers_stand_beside_ours",
    r"attnpo\.report pool\b": "tests/lab/studies/test_records.py::test_the_command_pools_studies",
    r"tests\.conformance": "tests/conformance/test_conformance.py::test_the_command_prints_records_and_counts",
    r"experiments\.theory": "tests/theory/test_theory.py::test_the_figures_and_the_command",
    r"benchmark=testbed": "tests/evaluation/test_testbed.py",
    r"benchmark=implicit_reward": "tests/evaluation/test_implicit_reward.py",
    r"experiments[./]benchmarks[./](step|extraction|pipeline|start|gpu|\w+_memory|harness)": "tests/test_benchmarks.py",
    r"experiments/benchmarks/token_coverage\.py": "tests/test_token_coverage.py",
    r"experiments\.check_tables\b": "tests/test_check_tables.py::test_the_papers_tables_as_shipped",
    r"--config-dir \S+ experiment=none": "tests/weights/test_formula.py",
    r"--config-dir \S+ (experiment=m|benchmark=judge)": "tests/docs/test_own_things_page.py::test_the_commands_compose",
    r"data\.path=own/": "tests/docs/test_data_page.py::test_an_example_is_read_by_its_command",
    r"data\.val_share=": "tests/data/test_tables.py",
    r"attnpo\.pair\b|round1/": "tests/evaluation/pairing/test_round.py::test_a_round_runs_by_the_commands_of_the_page",
    r"data\.mix=": "tests/evaluation/pairing/test_round.py::test_a_mixture_runs_by_the_command_of_the_page",
    r"attnpo\.show\b": "tests/run/test_show.py",
    r"model\.path=outputs/tiny/": "tests/conformance/test_family_fits.py::test_a_kind_trains_by_its_command",
    r"experiments\.pages\.judge_to_loss": "tests/docs/test_judge_page.py::test_its_command_runs_on_another_world",
}
# Commands of other programs: what is checked of them instead.
OTHERS: dict[str, tuple[str, Callable[[list[str]], bool]]] = {
    "make": ("a target of the Makefile", lambda words: words[1] in targets()),
    "pip": ("network: extras that setup.cfg has", lambda words: all(name in extras() for name in asked_extras(words))),
    "wandb": (
        "API: an account; the sweep file is there",
        lambda words: words[1] != "sweep" or (ROOT / words[2]).is_file(),
    ),
    "vllm": ("GPU: a server of another project", lambda words: words[1] == "serve"),
    "git": ("network: another project's files", lambda words: words[1] == "clone"),
    "export": ("sets variables", lambda words: all("=" in word for word in words[1:])),
    ".": ("activates the environment of `make setup`", lambda words: words[1:] == [".venv/bin/activate"]),
    "cd": ("goes to a folder", lambda words: len(words) == 2),
    "venv": ("network: an environment of its own", lambda words: True),
    "nltk.downloader": ("network: data of lm_eval", lambda words: True),
    "pytest": ("a test's file is there", lambda words: (ROOT / words[1]).exists()),
}
# What stands for something of the reader's, where composing needs it to be one thing.
FILLED = {
    r"\bSETTING\b": "testbed",
    r"experiment=NAME\b": "experiment=quickstart",
    r"seed=S\b": "seed=3",
    r"\[OPTION\]": "[mine]",
    r"--config-dir \S+": "--config-dir own",
    r"benchmark\.auxiliary=\S+": "benchmark.length_controlled=false",  # the file is read while composing
    r"\bTABLE/": "experiments/paper/main_results/",
    r"(report (?:scores|study|run|pool))$": r"\1 FOLDER",
    r"attnpo\.evaluate$": "attnpo.evaluate benchmark=judge",
    r" \.\.\.|\bKEY=VALUE\b": "",
}


@cache
def targets() -> set[str]:
    """Targets of the Makefile."""
    return set(re.findall(r"^([a-z]\w*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@cache
def extras() -> set[str]:
    """Extras of the package."""
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8").partition("[options.extras_require]")[2]
    return set(re.findall(r"^(\w+) =", text.partition("\n[")[0], re.MULTILINE))


def asked_extras(words: list[str]) -> list[str]:
    """The extras in the words of a ``pip install``."""
    return [name for word in words if (found := re.search(r"\[([\w,]+)\]", word)) for name in found[1].split(",")]


def entry_of(words: list[str]) -> tuple[str, list[str]] | None:
    """The entry point of attnpo that a command starts, and its arguments; None for another program."""
    if "-m" in words and words[words.index("-m") + 1].startswith("attnpo."):
        place = words.index("-m") + 1
        return words[place].removeprefix("attnpo."), words[place + 1 :]
    if words[0] == "attnpo" and len(words) > 1 and words[1] in ENTRIES:
        return words[1], words[2:]
    return None


def plainly(text: str) -> str:
    """A command in the form of the tables: ``python -m attnpo.fit`` for ``attnpo fit``."""
    return re.sub(r"^attnpo (\w+)", r"python -m attnpo.\1", text)


def reason(command: Command) -> str | None:
    """Why a command of attnpo is not run here; None where it is."""
    text = plainly(command.text)
    for table in (NOT_RUN, ELSEWHERE):
        for pattern, why in table.items():
            if re.search(pattern, text):
                return why
    return None


def program(words: list[str]) -> str:
    """The name of the other program that a command starts."""
    name = Path(words[0]).name or words[0]
    if re.fullmatch(r"python[\d.]*", name) and "-m" in words:
        return words[words.index("-m") + 1]
    return name


# ------------------------------------------------------------------------------------------------ what a reader has


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages have a reader write: blocks whose first line is ``# PATH``."""
    folder = tmp_path_factory.mktemp("reader")
    for page in PAGES:
        for _, _, block in FENCE.findall(page.read_text(encoding="utf-8")):
            if found := re.match(r"# (own/[\w/.]+)\n", block):
                path = folder / found[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def places(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the reader's modules be named by configurations, as the pages say."""
    modules = [path.stem for path in (reader / "own").glob("*.py")]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(settings, "find_spec", lambda package: package)  # peft and torchao are extras
    monkeypatch.setenv("ATTNPO_ALLOW_TARGETS", ",".join(["tests", *modules]))
    monkeypatch.syspath_prepend(str(reader / "own"))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("commands"))


# ------------------------------------------------------------------------------------------------ every command


def arguments(command: Command) -> tuple[str, list[str]] | None:
    """Entry point and arguments, placeholders filled and brackets of what may be left out taken off."""
    text = plainly(command.text)
    for pattern, value in FILLED.items():
        text = re.sub(pattern, value, text)
    words = Command(text, command.place).words
    found = entry_of(words)
    if found is None:
        return None
    return found[0], [word[1:-1] if re.fullmatch(r"\[[^\[\]]+\]", word) else word for word in found[1]]


def split(name: str, words: list[str]) -> tuple[str, list[str], list[str]]:
    """The configuration that a command composes, its overrides, and its other words."""
    if name == "evaluate" and "benchmark=judge" in words:
        name, words = "passport", [word for word in words if word != "benchmark=judge"]
    overrides = [word for word in words if "=" in word or word.startswith("~")]
    return name, overrides, [word for word in words if word not in overrides]


def test_the_pages_have_commands() -> None:
    assert len(COMMANDS) > 200
    assert {command.place.split("/")[0] for command in COMMANDS} >= {"README.md", "docs", "experiments", "configs"}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.place}: {command.text}"[:120])
def test_a_command_is_sound(command: Command, reader: Path) -> None:
    """Of attnpo: its overrides compose to a configuration without a wrong key or value; of others: by the table."""
    made = arguments(command)
    if made is None:
        words = command.words
        if any(re.search(pattern, command.text) for pattern in ELSEWHERE):
            return
        assert program(words) in OTHERS, f"{command.place}: `{command.text}` is neither run nor composed"
        why, holds = OTHERS[program(words)]
        assert holds(words), f"{command.place}: `{command.text}`: expected {why}"
        return
    name, overrides, rest = split(*made)
    assert made[0] in ENTRIES
    if name == "fit" and "experiment=my_study" in overrides:
        return  # the page's own test composes it with the page's own files
    if name not in COMPOSED_ENTRIES or "--help" in rest:
        assert reason(command) or "--help" in rest
        return
    config_dir = reader / rest[rest.index("--config-dir") + 1] if "--config-dir" in rest else None
    jobs = expand_sweep(overrides, config_dir) if "-m" in rest else [overrides]
    for job in (jobs[0], jobs[-1])[: len(jobs)]:
        cfg = compose(name, job, config_dir)
        if name == "report":
            cfg.what = [word for word in rest if not word.startswith("-")]
        validate(cfg, complete=False)
    if name == "fit" and any(word.startswith(("study.", "+study.")) for word in overrides):
        root = parse(cfg, complete=False).as_type(RootConfig)  # the arms are composed from the same overrides
        for arm in root.study.arms.values():
            make_composer(root, root.study).compose_arm(arm)
            break


@pytest.mark.parametrize("name", sorted(set(ELSEWHERE.values())))
def test_the_other_tests_are_there(name: str) -> None:
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert function in defined if function else any(name.startswith("test_") for name in defined)


@pytest.mark.parametrize("pattern", [*NOT_RUN, *ELSEWHERE])
def test_no_entry_of_a_table_is_idle(pattern: str) -> None:
    assert any(re.search(pattern, plainly(command.text)) for command in COMMANDS)


# ------------------------------------------------------------------------------------------------ those that run

RUN = [command for command in COMMANDS if arguments(command) is not None and reason(command) is None]
# In this process, without workers of its own; points without checkpoints and pages, which single runs have.
STUDY = (*("experiment=quickstart", "study.workers=1", "seeds=1"), 'study.shared=["reference=cached","callbacks=none"]')
# What the tiny world gives in place of a command's own.
GIVEN = {
    "setting",
    "model.path",
    "data.path",
    "seed",
    "seeds",
    "name",
    "resume",
    "printed",
    "label",
    "output",
    "layers",
}


def folder_of(name: str, words: tuple[str, ...]) -> str:
    """The folder of a command's run, one for each list of words."""
    return f"{name}-{digest(list(words))[:8]}"


def tiny(command: Command) -> tuple[str, tuple[str, ...]]:
    """Entry point and arguments that run a command on the tiny world; its paths are given when it runs.

    What is left of the command's own are the words that say what is done; many commands are one and the same then.
    """
    made = arguments(command)
    assert made is not None
    name, overrides, rest = split(*made)
    if "--help" in rest or "--cfg" in rest:
        return name, (*rest, *overrides)
    own = [word for word in overrides if word.lstrip("+").partition("=")[0] not in GIVEN]
    if name == "report" and rest[0] in ("study", "run"):
        return name, (rest[0],)
    if name == "fit" and "experiment=none" not in own and "setting=real_smoke" not in overrides:
        return name, (*(word for word in own if not word.startswith("experiment=")), *STUDY)
    return name, (*rest, *own)


@pytest.fixture(scope="session")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, tuple[str, ...]], int]:
    """Runs an entry point on the tiny world in this process, each list of arguments once; returns the exit status."""
    output = tmp_path_factory.mktemp("outputs")
    (output / "prompts.jsonl").write_text('{"prompt": "a review of the film"}\n', encoding="utf-8")

    @cache
    def started(name: str, words: tuple[str, ...]) -> int:
        module = import_module(f"attnpo.{'evaluate' if name == 'passport' else name}")
        words = tuple(re.sub(r"^export=", f"export={output}/", word) for word in words)
        main = module.run_judge_passport if name == "passport" else module.main
        given = [f"output={output}"]
        if {"--help", "--cfg"} & set(words):
            given = []
        elif name == "generate":
            given = [f"model.path={world.model}", "model.chat_template=null", f"data.path={output / 'prompts.jsonl'}"]
            given += [f"output={output / 'answers.jsonl'}", "sampling.max_new_tokens=4"]
        elif words in (("study",), ("run",)):
            assert started("fit", STUDY if words == ("study",) else ()) == 0
            words = (*words, str(output / folder_of("fit", STUDY if words == ("study",) else ())))
        else:
            given += world.overrides(f"name={folder_of(name, words)}")
        return run_entry(main, name, [*words, *given], "", "", positional="what" if name == "report" else None)

    return started


@pytest.mark.parametrize("command", RUN, ids=lambda command: command.text[:100])
def test_a_command_runs(
    command: Command, run: Callable[[str, tuple[str, ...]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*tiny(command)) == 0, capsys.readouterr().err
