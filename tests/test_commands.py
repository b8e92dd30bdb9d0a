"""``attnpo COMMAND``: what it lists, what it refuses, and that a command is the same either way of calling it."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnpo import __main__ as front
from attnpo.cli.help import CommandParser, parse_groups
from attnpo.cli.terminal import CALLED, command_text, rewrite_commands
from attnpo.config.compose import CONFIG_DIR, list_groups
from attnpo.system.packages import install_command
from attnpo.system.version import VERSION

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = "import sys; sys.argv[0] = 'attnpo'; from attnpo.__main__ import script; sys.exit(script())"


def start(*words: str, script: bool = False) -> subprocess.CompletedProcess[str]:
    """``python -m attnpo`` with ``words``, or what the installed command of that name runs."""
    how = ["-c", SCRIPT] if script else ["-m", "attnpo"]
    return subprocess.run(
        [sys.executable, *how, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def entry_points() -> set[str]:
    """Lists modules and rooms that can be run, without those that only say where a command went."""
    found = set()
    for path in (ROOT / "attnpo").rglob("*.py"):
        if path != ROOT / "attnpo" / "__main__.py" and 'if __name__ == "__main__"' in path.read_text(encoding="utf-8"):
            name = path.relative_to(ROOT / "attnpo").with_suffix("")
            found.add((name.parent if name.name == "__main__" else name).as_posix())
    return found - {"theory", "verify"}


def test_every_command_is_listed_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert front.main([]) == 0
    text = capsys.readouterr().out
    listed = set(re.findall(r"^  (\w+)  +\w", text, re.MULTILINE))
    assert listed == entry_points() and len(listed) > 6
    assert "\n  python -m attnpo.fit\n" in text and max(map(len, text.splitlines())) <= 80
    assert front.main(["--help"]) == 0 and capsys.readouterr().out == text
    assert front.main(["--version"]) == 0 and capsys.readouterr().out == f"attnpo {VERSION}\n"


def test_a_command_whose_module_is_missing_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(front.COMMANDS, "dream", "what no module does")
    assert "dream" not in front.available_commands() and front.main(["dream"]) == 2


def test_wrong_commands_get_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert front.main(["evalute"]) == 2
    refused = capsys.readouterr()
    assert refused.out == "" and refused.err.startswith("error: evalute: no such command; did you mean evaluate?\n")
    assert "commands: fit, weigh, " in refused.err
    assert front.main(["weights=uniform"]) == 2
    assert "`python -m attnpo.fit weights=uniform`" in capsys.readouterr().err


def test_commands_are_written_as_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "first `python -m attnpo.weigh x=1`, then python -m attnpo.fit or python -m attnpo; torchrun -m attnpo.weigh"
    monkeypatch.delenv(CALLED, raising=False)
    assert rewrite_commands(text) == text
    monkeypatch.setenv(CALLED, "attnpo")
    assert rewrite_commands(text) == "first `attnpo weigh x=1`, then attnpo fit or attnpo; torchrun -m attnpo.weigh"


@pytest.mark.parametrize(
    ("place", "active", "shown"),
    [
        ("work/.venv/bin", False, ".venv/bin/"),
        ("work/my env/bin", False, "'my env/bin/{}'"),
        ("elsewhere/bin", False, "{tmp}/elsewhere/bin/"),
        ("work/.venv/bin", True, ""),
        ("elsewhere/bin", True, ""),
    ],
)
def test_a_program_is_named_as_a_shell_finds_it(
    place: str, active: bool, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its path, short where it lies below the working directory; by its name where that is this very program."""
    for folder in (place, "another"):  # a python of another environment comes first where this one is not active
        (tmp_path / folder).mkdir(parents=True)
        for name in ("python", "torchrun", "pip", "attnpo"):
            (tmp_path / folder / name).write_text("#!/bin/sh\n")
            (tmp_path / folder / name).chmod(0o755)
    (tmp_path / "work").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "executable", str(tmp_path / place / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / (place if active else "another")))
    monkeypatch.delenv(CALLED, raising=False)

    def path(name: str) -> str:
        whole = shown if "{}" in shown else f"{shown}{{}}"
        return whole.replace("{tmp}", str(tmp_path)).format(name)

    text = "python -m attnpo.fit a=1; torchrun -m attnpo.weigh; pip install openai; wandb login; start it with python"
    made = rewrite_commands(text)
    assert made == (
        f"{path('python')} -m attnpo.fit a=1; {path('torchrun')} -m attnpo.weigh; {path('pip')} install openai; "
        "wandb login; start it with python"
    )
    assert rewrite_commands(made) == made
    assert command_text("fit", "a=b c") == f"{path('python')} -m attnpo.fit 'a=b c'"
    monkeypatch.setenv(CALLED, str(tmp_path / place / "attnpo"))
    assert command_text("fit", "a=1") == f"{path('attnpo')} fit a=1"


def test_both_ways_of_calling_give_the_same() -> None:
    direct = subprocess.run(
        [sys.executable, "-m", "attnpo.fit", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert start("fit", "--help").stdout == direct
    script = start("fit", "--help", script=True).stdout
    assert script == direct.replace("python -m attnpo.", "attnpo ") != direct
    refused = [start("fit", "layer_sweep", script=way) for way in (False, True)]
    assert [done.returncode for done in refused] == [2, 2]
    assert {done.stderr for done in refused} == {
        "error: 'layer_sweep': expected GROUP=OPTION or KEY=VALUE; see --help\n"
    }


def test_a_signal_ends_a_command_as_if_it_were_called_directly(tmp_path: Path) -> None:
    words = ["fit", f"output={tmp_path}", f"store={tmp_path / 'store'}"]
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *words], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stderr is not None
        first = next(line for line in running.stderr if "study quickstart" in line)
        time.sleep(0.2)
        os.kill(running.pid, signal.SIGTERM)
        rest = running.stderr.read()
    assert "python -m" not in first + rest
    assert running.returncode == 128 + signal.SIGTERM and "stopped by SIGTERM before training" in rest


def test_a_terminal_shows_what_is_waited_for_before_torch_is_there() -> None:
    """The line is gone before what the check has to say."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-X", "importtime", "-m", "attnpo", "fit", "weights.layer=2.5"]
    shown = b""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=follower) as running:
        os.close(follower)
        with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
            while part := os.read(leader, 65536):
                shown += part
    os.close(leader)
    assert running.returncode == 2
    text = shown.decode()
    imported = re.search(r"\| +torch\r\n", text)
    assert imported is not None
    assert text.index("checking the configuration ...") < imported.start() < text.index("\r\x1b[Kerror: ")


# ------------------------------------------------------------------------------------------------ help

# What a command composes, so that the same overrides name the same weights, and does not read.
TRAINING = {"experiment", "objective", "optimizer", "callbacks", "logger"}
HIDDEN = {
    "fit": set(),
    "weigh": {*TRAINING, "transform"},
    "passport": {*TRAINING, "transform"},
    "report": TRAINING,
    "show": {"experiment", "optimizer", "callbacks", "logger", "hardware", "debug"},
    "generate": {"model"},  # adapters and reward models are refused
    "evaluate": {"model"},
    "pair": set(),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIG_DIR.glob("*.yaml")))
def test_help_shows_the_groups_that_a_command_reads(name: str) -> None:
    composed = [
        group
        for root in (name, "fit" if "- fit " in (CONFIG_DIR / f"{name}.yaml").read_text(encoding="utf-8") else name)
        for group in parse_groups(CONFIG_DIR / f"{root}.yaml")
    ]
    text = CommandParser(name, "", "", None).help_text(CONFIG_DIR / f"{name}.yaml", list_groups())
    choices = {group.name for group in composed if list_groups()[group.name] != [group.default]}
    shown = {group for group in {*list_groups(), "model"} if re.search(rf"^ +\[?{group}=", text, re.MULTILINE)}
    assert shown == choices - HIDDEN[name] and shown
    assert not re.search(r"^ +\+", text, re.MULTILINE), "a hidden group must not come back as one of the user's own"


def test_an_extra_is_installed_from_where_the_package_came(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert install_command("lora") == "pip install -e '.[lora]'"
    assert rewrite_commands("set it, or pip install 'attnpo[lora]'").endswith("pip install -e '.[lora]'")
    monkeypatch.chdir(tmp_path)
    assert install_command("lora") == f"pip install -e '{ROOT}[lora]'"
    monkeypatch.setattr("attnpo.system.packages.__file__", str(tmp_path / "attnpo" / "system" / "packages.py"))
    assert install_command("lora") == "pip install 'attnpo[lora]'"
