"""The commands as a user starts them: help and errors come fast, what is logged is ours, every ending is one line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from attnpo.display.output import make_console, print_sections, tables_to_json
from attnpo.display.page import Paragraph, Section, TableBlock
from tests import warm
from tests.run.worlds import World, build_world

ROOT = Path(__file__).resolve().parents[1]
ENTRY_POINTS = sorted(
    path.stem for path in (ROOT / "attnpo").glob("*.py") if "run_entry(main" in path.read_text(encoding="utf-8")
)
SLOW_PACKAGES = ("lightning", "transformers", "datasets", "wandb", "matplotlib")
# Help must come within two seconds on an idle machine; the test's machine may be busy.
PATIENCE = 8.0


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Finishes a process of ``python -m``."""
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


TURNS = """
import contextlib, io, json, runpy, sys
found = []
for module, *words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    sys.argv, status = ["-m", *words], 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
    found.append((status, out.getvalue(), err.getvalue()))
sys.stdout.write(json.dumps([found, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def in_turn(commands: Sequence[Sequence[str]]) -> tuple[list[subprocess.CompletedProcess[str]], set[str]]:
    """Finishes commands (``MODULE WORD ...``) one after the other in one process; and the packages it has loaded."""
    done = subprocess.run(
        [sys.executable, "-c", TURNS, json.dumps([list(words) for words in commands])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, packages = json.loads(done.stdout)
    return [subprocess.CompletedProcess(words, *one) for words, one in zip(commands, found, strict=True)], {*packages}


def run_script(script: str, folder: Path, *words: str, **environment: str) -> tuple[warm.Process, Path]:
    """Starts a script in a process of its own that has the imports; and the file that all it says goes to."""
    (folder / "script.py").write_text(script)
    log = folder / "log.txt"
    log.touch()
    return warm.start([str(folder / "script.py"), *words], {**os.environ, **environment}, log), log


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_help_comes_at_once(name: str) -> None:
    begin = time.monotonic()
    done = start(f"attnpo.{name}", "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert f"python -m attnpo.{name}" in done.stdout
    assert time.monotonic() - begin < PATIENCE


def best_times(*commands: list[str], rounds: int = 2) -> list[float]:
    """The shortest of several runs of each command, taken in turns so that all meet the same load."""
    seconds = [[0.0] * rounds for _ in commands]
    for turn in range(rounds):
        for place, command in enumerate(commands):
            begin = time.perf_counter()
            subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, timeout=120, check=False)
            seconds[place][turn] = time.perf_counter() - begin
    return [min(each) for each in seconds]


def test_help_costs_little_more_than_importing_hydra() -> None:
    """On an idle machine: 0.2 s each."""
    bare, asked = best_times(["-c", "import hydra"], ["-m", "attnpo.fit", "--help"])
    assert asked < 3 * bare + 0.2


def test_an_error_costs_little_more_than_importing_torch() -> None:
    """On an idle machine: 1.5 s and 2.1 s."""
    bare, refused = best_times(["-c", "import torch"], ["-m", "attnpo.fit", "weights.layer=2.5"])
    assert refused < 2.5 * bare + 0.5


def refusal(errors: str) -> str:
    """Leaves out what a command says while it brings torch."""
    passing = re.compile(r"\d\d:\d\d:\d\d checking the configuration")
    return "\n".join(line for line in errors.splitlines() if not passing.match(line))


REAL = ("setting=real_smoke", "model.path=unset")
# What is refused once its components are looked at, for which torch is loaded, and nothing that takes longer.
WRONG: list[tuple[str, str]] = [
    ("attnpo.fit weights.layr=2", "did you mean weights.layer?"),
    ("attnpo.fit weights=attension", "Available options in 'weights': attention, column, confidence, contrast, "),
    ("attnpo.fit weights.layer=2.5", "weights.layer: expected int or str, got 2.5"),
    ("attnpo.fit optimizer.lr=fast", "optimizer.lr: expected float, got 'fast'"),
    ("attnpo.fit trainer.validate_every=0", "trainer.validate_every must be at least 1"),
    ("attnpo.fit seed=abc", "seed: expected int, got 'abc' (str)"),
    ("attnpo.fit layer_sweep", "expected GROUP=OPTION or KEY=VALUE"),
    *((f"attnpo.{name} setting=real_smoke", "model.path: required; set model.path=VALUE") for name in ("fit", "weigh")),
    ("attnpo.fit setting=real_smoke", "data.path: required; set data.path=VALUE"),
    ("attnpo.report weights setting=real_smoke", "model.path: required; set model.path=VALUE"),
    ("attnpo.generate", "model.path: required"),
    ("attnpo.generate", "data.path: required"),
    ("attnpo.report", "report: expected `weights`, `study FOLDER ...`, `run FOLDER ...`, `scores FOLDER"),
    ("attnpo.report study", "report study: expected `weights`"),
    (
        "attnpo.report weights outputs/run",
        "report weights: expected GROUP=OPTION or KEY=VALUE after `weights`, got 'outputs/r",
    ),
    ("attnpo.report weights layers=[1,1]", "layers: expected each layer once, got 1 more than once"),
    ("attnpo.report weights layers=most", "layers: expected all or a list"),
    ("attnpo.report weights printed=none.csv", "printed=none.csv: expected a CSV file, but it does not exist"),
    ("attnpo.report weights weights.layr=1", "did you mean weights.layer?"),
    ("attnpo.report run outputs/nowhere", "outputs/nowhere"),
]


def test_a_wrong_word_is_refused_before_anything_heavy_is_loaded() -> None:
    found, loaded = in_turn([command.split() for command, _ in WRONG])
    for done, (command, message) in zip(found, WRONG, strict=True):
        errors = refusal(done.stderr)
        assert done.returncode == 2 and done.stdout == "", command
        assert errors.startswith("error: ") and message in errors and "Traceback" not in errors, command
    assert "hydra" in loaded, "the listing must show what was imported"
    assert loaded & set(SLOW_PACKAGES) == set()


# What is refused by looking at the data, for which not even torch is needed.
WITHOUT_PAIRS: list[tuple[str, str, str]] = [
    (
        "fit",
        "data.path={folder}/one.jsonl",
        "is a single table, so its rows must be split into training and validation sets: set data.val_share (0.1",
    ),
    (
        "weigh",
        "data.path={folder}/one.jsonl",
        "is a single table, so its rows must be split into training and validation sets: set data.val_share",
    ),
    ("report weights", "data.path={folder}", "no file test.jsonl, test.csv or test.parquet; its files: one.jsonl"),
    ("evaluate benchmark=judge", "data.path={folder}", "split the training data with data.val_share=0.1"),
    ("fit", "data.path={folder} data.val_split=null", "data.val_split=null: name the validation split, or set"),
    (
        "fit",
        "data.mix={{a:{{path:{folder}/one.jsonl,val_rows:'3'}},b:{{path:{folder}/one.jsonl}}}}",
        "is a single table",
    ),
]


def test_data_without_validation_pairs_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    """Nor is it loaded to show a configuration, after which nothing is run."""
    (tmp_path / "one.jsonl").write_text("{}\n", encoding="utf-8")
    commands = [
        [f"attnpo.{name}", *words, *REAL, *given.format(folder=tmp_path).split()]
        for (name, *words), given in ((command.split(), given) for command, given, _ in WITHOUT_PAIRS)
    ]
    shows = ["attnpo.fit", "--cfg", "job", "seed=7", f"output={tmp_path / 'out'}"]
    (*found, done), loaded = in_turn([*commands, shows])
    for refused, (*_, message) in zip(found, WITHOUT_PAIRS, strict=True):
        errors = refusal(refused.stderr)
        assert refused.returncode == 2 and refused.stdout == ""
        assert errors.startswith("error: ") and message in errors and "data.val_share" in errors
    shown = OmegaConf.create(done.stdout)
    assert done.returncode == 0
    assert (shown.seed, shown.objective.beta, shown.weights.layer) == (7, 0.1, 1)
    assert shown.study.name == "quickstart" and not (tmp_path / "out").exists()
    assert "hydra" in loaded and loaded & {*SLOW_PACKAGES, "torch"} == set()


# ------------------------------------------------------------------------------------------------ what a run says

OURS = re.compile(r"\d\d:\d\d:\d\d +\S")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"))


def run_into_file(world: World, folder: Path, *more: str, command: str = "fit") -> tuple[int, str]:
    """Exit status and error stream, written to a file, of a command on the tiny world; nothing goes to stdout."""
    with (folder / "stderr.txt").open("wb") as stream:
        done = subprocess.run(
            [sys.executable, "-m", f"attnpo.{command}", *world.overrides(f"output={folder}", "name=run", *more)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stream,
            timeout=600,
            check=False,
        )
    assert done.stdout == b""
    return done.returncode, (folder / "stderr.txt").read_bytes().decode()


def test_a_run_logs_lines_of_ours_each_once(world: World, tmp_path: Path) -> None:
    """No bar, banner, tip or warning of a library, and nothing twice; the report comes in its order."""
    status, text = run_into_file(world, tmp_path, "trainer.progress=true")
    assert status == 0 and text.endswith("\n")
    assert "\r" not in text and "\x1b" not in text
    lines = text.splitlines()
    assert [line for line in lines if not OURS.match(line)] == []
    said = Counter(line[9:] for line in lines)
    assert [line for line, count in said.items() if count > 1] == []
    marks = [
        "fit       one run, setting real_smoke",
        f"model     {world.model}",
        f"data      {world.data}",
        "weights   attention, layer last",
        "objective twdpo, beta 0.1",
        "budget    1 epoch; seed 0, CPU; results in",
        f"model: {world.model}, LlamaForCausalLM, 20,064 parameters, float32, 2 layers",
        "weights: 0 of 18 pairs in the store; computing 18, at most about",
        "train: tokens at p50/p90/p99/max: prompt",
        "steps: 4 pairs each = 2 per forward x 2 accumulated x 1 process; 3 per epoch, 3 in total",
        "row 0, pair",
        "training 20064 parameters for 3 optimiser steps",
        "step 3/3",
        "result: validation loss",
        "next steps:",
    ]
    places = [next((i for i, line in enumerate(lines) if line[9:].startswith(mark)), -1) for mark in marks]
    assert -1 not in places and places == sorted(places)


def test_only_the_first_process_reports(world: World, tmp_path: Path) -> None:
    """The second of two processes that fill a store, as torchrun would start it."""
    environment = {**os.environ, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    words = world.overrides(f"store={tmp_path / 'store'}")
    assert warm.start(["-m", "attnpo.weigh", *words], environment, tmp_path / "log.txt").wait(600) == 0
    assert (tmp_path / "log.txt").read_text() == ""
    assert list(tmp_path.rglob("*.parquet"))


REPEATS = """
import logging
from attnpo.cli.terminal import log_to_terminal
log = logging.getLogger("attnpo.run")
for command in range(2):
    with log_to_terminal():
        for point in range(2):
            log.warning("warning: the judge is at chance")
            log.info("point %d", point)
"""


def test_a_warning_of_every_point_is_shown_once_by_a_command() -> None:
    done = subprocess.run([sys.executable, "-c", REPEATS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line[9:] for line in done.stderr.splitlines()] == [
        "warning: the judge is at chance",
        "point 0",
        "point 1",
    ] * 2


# ------------------------------------------------------------------------------------------------ how a command ends

CYCLE = """
import atexit, sys
from attnpo.cli.terminal import run_guarded
class Kept:
    def __init__(self):
        self.itself = self
    def __del__(self):
        sys.stdout.write("found as garbage\\n")
def main():
    Kept()
    return 0
if sys.argv[1] == "guarded":
    run_guarded(main)
else:
    main()
atexit.register(sys.stdout.write, "last act\\n")
"""


@pytest.mark.parametrize(("how", "said"), [("guarded", "last act\n"), ("plain", "last act\nfound as garbage\n")])
def test_a_command_ends_without_a_search_for_garbage(how: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", CYCLE, how], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == said


# A shell starts what runs in its background with SIGINT ignored; a terminal does not.
WAITS = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from attnpo.cli.terminal import install_signal_handlers
install_signal_handlers()
from attnpo.cli.entry import run_entry
def main(cfg):
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    time.sleep(60)
sys.exit(run_entry(main, "fit", [], "Waits.", "python -m attnpo.fit"))
"""


@pytest.mark.parametrize(
    ("number", "status", "last"),
    [
        (signal.SIGTERM, 143, "stopped by SIGTERM before training; stored results are kept"),
        (signal.SIGINT, 130, "stopped by SIGINT before training; stored results are kept"),
        (signal.SIGUSR1, 138, "stopped by SIGUSR1 before training; stored results are kept"),
    ],
)
def test_a_signal_ends_a_command_with_one_line(number: signal.Signals, status: int, last: str, tmp_path: Path) -> None:
    """Also when it is delivered a second time at once."""
    running, log = run_script(WAITS, tmp_path)
    limit = time.monotonic() + 60
    while "ready" not in log.read_text():
        assert running.poll() is None and time.monotonic() < limit, log.read_text()
        time.sleep(0.01)
    running.send_signal(number)
    running.send_signal(number)
    assert running.wait(60) == status
    assert refusal(log.read_text()) == f"ready\n{last}"


# A module that is imported meets a signal, and an exception that comes of it goes the way of any that libraries catch.
IMPORTS = """
import os, runpy, signal, sys
class Meets:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            try:
                os.kill(os.getpid(), int(number))
            except BaseException:
                pass
number, module, entry = sys.argv[1:]
sys.argv = ["-m"]
sys.meta_path.insert(0, Meets())
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module(entry, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("number", "module", "entry"),
    [
        (signal.SIGTERM, "hydra", "attnpo.fit"),
        (signal.SIGINT, "hydra", "attnpo.weigh"),
        (signal.SIGUSR1, "attnpo.config.compose", "attnpo.generate"),
        (signal.SIGINT, "torch", "attnpo.fit"),
    ],
)
def test_a_signal_during_imports_ends_a_command_with_one_line(
    number: signal.Signals, module: str, entry: str, tmp_path: Path
) -> None:
    """The last one meets it within the command, where it is otherwise an exception."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, str(int(number)), module, entry],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ATTNPO_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("stopped by ")]
    assert (done.returncode, lines) == (
        128 + number,
        [f"stopped by {number.name} before training; stored results are kept"],
    )
    assert "Traceback" not in done.stderr and done.stderr.splitlines()[-1] == lines[0]


# A signal meets a list of a configuration whose new item is not there yet: the library's own cleanup fails on it.
COMPOSES = """
import os, runpy, signal, sys
def frames(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back
def meet(frame, event, value):
    if event != "call" or frame.f_code.co_name != "_maybe_wrap":
        return
    found = list(frames(frame))
    lists = [one.f_locals["self"] for one in found if one.f_code.co_name == "append"]
    if any("importlib" in one.f_code.co_filename for one in found) or not lists:
        return
    if lists[0].__dict__["_flags_cache"] is not None:
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGTERM)
sys.argv = ["-m", "experiment=layer_sweep", "--cfg", "job"]
sys.setprofile(meet)
runpy.run_module("attnpo.fit", run_name="__main__", alter_sys=True)
"""


def test_a_signal_while_composing_ends_a_command_with_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPOSES], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    said = "stopped by SIGTERM before training; stored results are kept\n"
    assert (done.returncode, done.stdout, done.stderr) == (143, "", said)


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    """Removes the folder that a command is started in."""
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["sh", "-c", 'rmdir ../gone && exec "$0" -m attnpo.fit --cfg job', sys.executable],
        cwd=gone,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "error: the current folder no longer exists: change to an existing folder and rerun the command\n"
    )


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b2J \u202egnp.exe"
SPELLED = "\\x1b]0;owned\\x07\\x1b[2J\\x9b2J \\u202egnp.exe"


# A server's words in a refusal, in a line of the log, of another library's log and in a fault's traceback.
SPEAKS = """
import logging, os, sys, warnings
from attnpo.cli.terminal import install_signal_handlers
install_signal_handlers()
from attnpo.cli.entry import run_entry
from attnpo.system.errors import UserError
said = os.environ["SAID"].encode().decode("unicode_escape")
def main(cfg):
    logging.getLogger("attnpo").warning("a reply: %s", said)
    library = logging.getLogger("library")
    library.addHandler(logging.StreamHandler())
    library.propagate = False
    library.warning("a reply: %s", said)
    warnings.warn(said)
    raise {"refusal": UserError, "fault": RuntimeError}[sys.argv[1]](said)
sys.exit(run_entry(main, "fit", [], "Speaks.", "python -m attnpo.fit"))
"""


@pytest.mark.parametrize(("how", "status", "places"), [("refusal", 2, 4), ("fault", 1, 4)])
def test_no_text_of_others_acts_on_a_terminal(how: str, status: int, places: int, tmp_path: Path) -> None:
    running, log = run_script(SPEAKS, tmp_path, how, SAID=SPELLED)
    assert running.wait(120) == status
    said = log.read_text()
    assert said.count(SPELLED) == places, said
    assert [letter for letter in HOSTILE if not letter.isprintable() and letter in said] == []


def test_no_text_of_a_table_acts_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = TableBlock(["arm", HOSTILE], [[HOSTILE, 1.0]], HOSTILE)
    print_sections(make_console(), [Section(HOSTILE, [table, Paragraph(HOSTILE)])])
    said = capsys.readouterr().out
    assert said.count("]0;owned") == 5, said
    assert [letter for letter in HOSTILE if not letter.isprintable() and letter in said] == []


# The first rank starts others by their own command line, as Lightning does, and is killed.
RANKS = """
import os, signal, subprocess, sys, time
from attnpo.cli.terminal import install_signal_handlers
install_signal_handlers()
if len(sys.argv) > 1:
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    time.sleep(60)
else:
    second = subprocess.Popen([sys.executable, "-c", os.environ["RANKS"], "second"], stdout=subprocess.PIPE)
    second.stdout.readline()
    sys.stdout.write(f"{second.pid}\\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_rank_ends_with_the_one_that_started_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RANKS],
        cwd=ROOT,
        env={**os.environ, "RANKS": RANKS},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    second = int(done.stdout)
    deadline = time.monotonic() + 15
    while running(second) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = running(second)
    if left:
        os.kill(second, signal.SIGKILL)
    assert not left


def running(pid: int) -> bool:
    """Whether a process is there; one that is over but not waited for is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_golden_records_are_verified_without_a_bar(vectors: Path) -> None:
    done = start("tests.conformance", str(vectors / "losses.json"), "--only", "no such record")
    assert (done.returncode, done.stderr) == (1, "")


def test_a_report_of_folders_prints_their_tables(tmp_path: Path) -> None:
    """By what the folder holds; a key that only weights read is said to have no effect."""
    (tmp_path / "s").mkdir()
    sections = [Section("Arms", [TableBlock(["arm", "n"], [["uniform", 0.25]]), Paragraph("one note")])]
    (tmp_path / "s" / "tables.json").write_text(tables_to_json(sections))
    (tmp_path / "s" / "study.json").write_text(json.dumps({"digest": "d", "runs": []}))
    done = start("attnpo.report", str(tmp_path / "s"), f"output={tmp_path}", "name=r", "min_count=3")
    assert done.returncode == 0
    assert "uniform" in done.stdout and "0.25" in done.stdout and "one note" in done.stdout
    assert "warning: min_count has no effect: finished folders are read as they are" in done.stderr
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == [
        "report.html",
        "report.json",
        "study.csv",
        "study.md",
        "study.tex",
    ]


def test_a_report_of_weights_prints_tables_and_logs_beside_them(world: World, tmp_path: Path) -> None:
    """Tables on the output, lines of ours on the error stream."""
    done = start("attnpo.report", "weights", *world.overrides("layers=[1,2]", f"output={tmp_path}", "name=r"))
    assert done.returncode == 0
    assert "attention L1" in done.stdout and "effective" in done.stdout  # wider headers are wrapped
    assert [line for line in done.stderr.splitlines() if not OURS.match(line)] == []


@pytest.mark.parametrize(("rank", "last"), [("0", "out\nlast act\n"), ("1", "out\n")])
def test_processes_beside_the_leading_one_leave_at_once(rank: str, last: str) -> None:
    """A thread of theirs that is still at work must not meet an interpreter that is being taken down."""
    script = "import atexit; from attnpo.cli.terminal import exit_process; atexit.register(print, 'last act'); "
    script += "print('out'); exit_process(3)"
    environment = {**os.environ, "RANK": rank, "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (3, last)
