"""Terminal output and exit handling of commands: one log format, quiet libraries, one-line errors and signals.

Does not import torch, directly or indirectly. Only the first process of a job prints.
"""

import atexit
import errno
import gc
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import active_children, parent_process
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, TextIO

from attnpo.system.credentials import mask_credentials
from attnpo.system.errors import UserError
from attnpo.system.packages import describe_missing_package, install_command
from attnpo.system.processes import _exit_callbacks, is_main_process, rank_and_world_size, world_size

FORMAT = "%(asctime)s %(message)s"
CLOCK = "%H:%M:%S"
# Environment variables that libraries read on import and the processes of a study inherit.
QUIET = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
WITHOUT_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "WANDB_SILENT": "true"}
CALLED = "ATTNPO_CALLED_AS"  # path of the installed script `attnpo` if it was used; inherited by child processes
_log = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------- what is said


# Programs of this environment at the start of a command; a name with a path is already unambiguous.
_PROGRAM = re.compile(r"(?<![\w./-])(?:python(?= -[mc] )|torchrun(?= -)|pip(?= install )|wandb(?= login))")
_FRONT = re.compile(r"(?<![\w./-])python -m attnpo(?:\.|\b)")
_EXTRA = re.compile(r"pip install 'attnpo\[(\w+)\]'")


def rewrite_commands(text: str) -> str:
    """Rewrites commands in ``text`` for the user's shell: programs that are not on PATH are called by path."""
    text = _EXTRA.sub(lambda found: install_command(found[1]), text)
    if called := os.environ.get(CALLED):
        text = _FRONT.sub(lambda found: _shortest_command(called) + " " * found[0].endswith("."), text)
    return _PROGRAM.sub(lambda found: _program_command(found[0]), text)


def _program_command(name: str) -> str:
    """Returns the command that runs ``name`` from this environment, or ``name`` itself if there is none."""
    path = sys.executable if name == "python" else os.path.join(os.path.dirname(sys.executable), name)
    return _shortest_command(path) if os.path.isfile(path) else name


def _shortest_command(path: str) -> str:
    """Returns the shortest command that starts the program at ``path`` from the current folder."""
    name = os.path.basename(path)
    found = shutil.which(name)
    with suppress(OSError):  # the folder may be gone
        if found is not None and os.path.samefile(os.path.dirname(found), os.path.dirname(path)):
            return name
        short = os.path.relpath(path)
        path = path if short.startswith("..") or os.sep not in short else short
    return shlex.quote(path)


# Characters that control a terminal or cannot be encoded: controls except newline and tab, bidi marks, lone surrogates.
_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def make_printable(text: str) -> str:
    """Escapes terminal control characters as in a Python literal, because errors may quote untrusted text."""
    return _ACTING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class LogFormatter(logging.Formatter):
    """Formatter that keeps commands in log lines runnable and strips credentials and terminal control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the log line and any traceback."""
        return make_printable(mask_credentials(rewrite_commands(super().format(record))))


class _Record(logging.LogRecord):
    """Log record without terminal control characters, regardless of which library's handler writes it."""

    def getMessage(self) -> str:
        return make_printable(super().getMessage())


def _write_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Writes the traceback of an uncaught error, like Python's own hook."""
    sys.stderr.write(make_printable("".join(traceback.format_exception(kind, error, trace))))


def command_text(name: str, *arguments: str) -> str:
    """Returns the shell command that runs a command of this package, with credentials masked."""
    return rewrite_commands(f"python -m attnpo.{name}") + "".join(
        f" {shlex.quote(mask_credentials(word))}" for word in arguments
    )


def format_override(key: str, text: str) -> str:
    """Formats an override KEY=TEXT for the command line, quoted unless Hydra reads the text literally."""
    if re.fullmatch(r"[\w./+@-]+", text):
        return f"{key}={text}"
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"


_warned: set[str] = set()


def _is_first_occurrence(record: logging.LogRecord) -> bool:
    """Returns whether a warning is new; the runs of a study repeat the same warnings."""
    text = record.getMessage() if record.levelno == logging.WARNING else ""
    new = not text or text not in _warned
    _warned.add(text)
    return new


@contextmanager
def log_to_terminal(*, bars: bool = True) -> Iterator[None]:
    """Logs attnpo's messages to stderr inside the context, with quiet libraries and without repeated warnings.

    Progress bars are off if stderr is not a terminal, in all processes but the main one, or if ``bars`` is false.
    """
    _warned.clear()
    handler = logging.StreamHandler()
    handler.addFilter(_is_first_occurrence)
    handler.setFormatter(LogFormatter(FORMAT, CLOCK))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    package = logging.getLogger("attnpo")
    level = package.level
    package.setLevel(logging.INFO if is_main_process() else logging.ERROR)
    wanted = {**QUIET, **({} if bars and sys.stderr.isatty() and is_main_process() else WITHOUT_BARS)}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    records = logging.getLogRecordFactory()
    logging.setLogRecordFactory(_Record)
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
                    warnings.simplefilter("ignore", category)
                warnings.showwarning = _log_warning
            yield
    finally:
        package.setLevel(level)
        logging.setLogRecordFactory(records)
        for name in added:
            os.environ.pop(name, None)


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Logs a warning as one line."""
    text = " ".join(str(message).split())
    _log.warning("warning: %s: %s (%s:%d)", category.__name__, text, Path(filename).name, lineno)


# --------------------------------------------------------------------------------------------- how a command ends


# Ctrl-C, termination of the job, and SLURM's advance warning (--signal=USR1@120).
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# A shell and a launcher both forward one Ctrl-C, milliseconds apart; signals within this many seconds count as one.
REPEAT = 1.0
STARTER = "ATTNPO_STARTED_BY"  # process id of the command that started this process


class SignalInterrupt(KeyboardInterrupt):
    """Raised when a signal arrives outside training; code that handles Ctrl-C also handles this."""

    def __init__(self, number: int) -> None:
        when = "" if _state.training else " before training"
        super().__init__(f"stopped by {signal.Signals(number).name}{when}; stored results are kept")
        self.exit_status = 128 + number


@dataclass
class _SignalState:
    """State that determines how signals are handled; ``asked``: time of the last signal handled."""

    training: bool = False
    raises: bool = False
    asked: float | None = None


_state = _SignalState()


def mark_training_started() -> None:
    """Records that training started, so that signal messages no longer say "before training"."""
    _state.training = True


def install_signal_handlers() -> None:
    """Installs handlers for SIGINT, SIGTERM and SIGUSR1 that print one line and stop this process and its children.

    Call it before heavy imports. Inside ``run_guarded`` the handler raises an exception; elsewhere the process exits at
    once. Ignored signals stay ignored until training. A rank also exits when the process that started it has died.
    """
    sys.excepthook = _write_traceback
    parent = _watched_parent()
    os.environ[STARTER] = str(os.getpid())
    if parent is not None:
        threading.Thread(target=_exit_with_parent, args=(parent,), name="ends with its launcher", daemon=True).start()
    _set_signal_handlers()


def _watched_parent() -> int | None:
    """Returns the process that this rank must not outlive (torchrun agent, SLURM daemon or first rank), or None."""
    parent, starter = os.getppid(), os.environ.get(STARTER)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return parent
    if starter is not None and ("LOCAL_RANK" in os.environ or starter == str(parent)):
        return int(starter)
    return parent if "SLURM_STEP_ID" in os.environ and world_size() > 1 else None


def _set_signal_handlers() -> None:
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)


def _exit_with_parent(parent: int) -> None:
    """Exits this process as soon as ``parent`` is no longer its parent."""
    if not _is_agent_gone():
        while os.getppid() == parent:
            time.sleep(1)
    os._exit(1)


def _is_agent_gone() -> bool:
    """Checks whether torchrun's agent has already died, in which case its address refuses connections."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # otherwise a rank listens at that address
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=60).close()
        except OSError as problem:
            return isinstance(problem, ConnectionRefusedError)
    return False


def _on_signal(number: int, frame: FrameType | None) -> None:
    first, now = _state.asked is None, time.monotonic()
    if _state.asked is not None and now - _state.asked < REPEAT:
        return
    _state.asked = now
    for child in active_children():
        child.terminate()
    stop = SignalInterrupt(number)
    if first and _state.raises and not _is_importing_or_composing(frame):
        raise stop
    if is_main_process():
        os.write(2, f"{stop}\n".encode())  # the interrupted code may be using the stream
    for act in _exit_callbacks:
        with suppress(Exception):
            act()
    os._exit(stop.exit_status)


# Cleanup code in these packages fails on half-built state and would replace our exception by another one.
_COMPOSING = ("hydra", "omegaconf", "antlr4")


def _is_importing_or_composing(frame: FrameType | None) -> bool:
    """Checks for a running import or config composition, where an exception could be swallowed or replaced."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if frame.f_code.co_filename.startswith("<frozen importlib") or package in _COMPOSING:
            return True
        frame = frame.f_back
    return False


@contextmanager
def handling_signals() -> Iterator[None]:
    """Handles signals inside the context like ``install_signal_handlers``; training installs other handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    _state.training, _state.asked = False, None
    _set_signal_handlers()
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def exit_with_parent() -> None:
    """Makes a multiprocessing child ignore Ctrl-C, which its parent handles, and exit when the parent dies."""
    parent = parent_process()
    if parent is None:
        raise RuntimeError("this process was not started by multiprocessing")
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="ends with the parent", daemon=True).start()


@cache
def skip_gc_at_exit() -> None:
    """Skips the final garbage collection at exit, which costs a second or two; atexit handlers still run."""
    atexit.register(gc.freeze)


def run_guarded(command: Callable[[], int]) -> int:
    """Runs ``command`` and returns its exit status; errors that a user can fix become one line on stderr.

    The status is 2 for a UserError, a missing package or a full disk, 128 + n for signal n, and otherwise the
    ``exit_status`` of the exception.
    """
    skip_gc_at_exit()
    before = _state.raises
    try:
        try:
            _state.raises = True
            status = command()
            with suppress(BrokenPipeError):
                sys.stdout.flush()  # stdout may be a file on a full disk
            return status
        finally:
            _state.raises = before
    except BaseException as error:
        _discard_output()
        ending = exit_status_and_message(error)
        if ending is None:
            raise
        status, line = ending[0], make_printable(mask_credentials(rewrite_commands(ending[1])))
        if is_main_process():
            sys.stderr.write(f"{line}\n")
        elif status == 2:  # the main process may not have failed
            sys.stderr.write(f"{line} (process {rank_and_world_size()[0]})\n")
        return status


def _discard_output() -> None:
    """Discards output that cannot be written, so the interpreter does not fail on it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_process(status: int) -> NoReturn:
    """Exits with ``status``. Ranks above 0 skip interpreter shutdown because torch's threads may hang it."""
    if not is_main_process():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def exit_status_and_message(error: BaseException) -> tuple[int, str] | None:
    """Returns the exit status and the message for ``error``, or None for a bug that needs its traceback."""
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        return status, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, UserError):
        return 2, f"error: {error}"
    told = _describe_full_disk(error) or _describe_path_error(error) or describe_missing_package(error)
    return None if told is None else (2, f"error: {told}")


# No space left on the disk, quota exceeded, file size limit reached (ulimit -f).
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
KEPT = (
    "files written earlier are intact: free space, or choose a folder on another disk, and rerun the same command, "
    "which continues from there"
)


def _describe_full_disk(error: BaseException | None) -> str | None:
    """Returns a message with the error's notes on saved work if a full disk caused ``error``; otherwise None."""
    number, name, below = None, None, error
    while below is not None:
        rust = re.search(r"\(os error (\d+)\)", str(below))  # safetensors, tokenizers
        code = below.errno if isinstance(below, OSError) else int(rust[1]) if rust else None
        if code in _FULL:
            number, name = number or code, name or getattr(below, "filename", None)
        below = below.__cause__ or below.__context__
    if number is None:
        return None
    kept = " ".join(getattr(error, "__notes__", [])) or KEPT
    return f"{name or 'a file'} cannot be written: {os.strerror(number)}; {kept}"


def _describe_path_error(error: BaseException) -> str | None:
    """Returns a message if a path is too long or a folder was removed during the command; otherwise None."""
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.ENAMETOOLONG:
        return f"a name in this path is too long for the file system: {error.filename}; use a shorter name"
    if error.errno not in (errno.ENOENT, errno.ESTALE):
        return None
    try:
        here = os.getcwd()
    except FileNotFoundError:
        return "the current folder no longer exists: change to an existing folder and rerun the command"
    folder = os.path.dirname(os.path.join(here, os.fsdecode(error.filename or "")))
    if os.path.isdir(folder):
        return None
    return (
        f"the folder {folder} does not exist: it was removed or renamed while the command was using it; rerun the "
        "command"
    )
