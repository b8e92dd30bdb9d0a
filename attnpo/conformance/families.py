"""``attnpo.verify families``: every causal LM of transformers, built tiny, through loader, numbers and commands.

A family has one outcome: equal, refused (with the reason, in the words a user gets) or FAIL. What could not be run is a
FAIL, but for classes that transformers itself cannot build or load again here.
"""

import logging
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from transformers import AutoModelForCausalLM

from attnpo.conformance.family_checks import Finding, findings
from attnpo.conformance.family_commands import Command, commanded
from attnpo.conformance.family_models import families, tiny_model
from attnpo.conformance.family_tokenizer import tiny_tokenizer
from attnpo.schema import UserError

log = logging.getLogger(__name__)

EQUAL, NO_JUDGE, REFUSED, FAILED = "equal", "policy only", "refused", "FAIL"
MUST = ("fit", "resume", "export", "generate")  # commands that a model which can be loaded is refused by for no reason
STATUSES = (EQUAL, NO_JUDGE, REFUSED, FAILED)


@dataclass(frozen=True)
class Family:
    """What became of one type: class, status, the layout that ``auto`` takes, problems and reasons, seconds."""

    name: str
    model: str
    status: str
    layout: str
    notes: tuple[str, ...]
    seconds: float

    def line(self) -> str:
        """One line of the terminal."""
        said = f"  ({'; '.join(self.notes)})" if self.notes else ""
        return f"{self.name:<26} {self.status:<12} {self.layout:<14} {self.seconds:5.1f} s{said}"


@dataclass(frozen=True)
class Ways:
    """The commands' mains, which this room may not import."""

    fit: Command
    generate: Command


def verify_families(ways: Ways, only: Sequence[str] = (), keep: Path | None = None) -> Iterator[Family]:
    """The outcome of every family whose name matches a pattern of ``only`` (all by default), each as it is done.

    ``keep``: a folder where the models stay, each with its tokenizer; a temporary one by default.

    Raises:
        UserError: no family matches.
    """
    names = [name for name in families() if not only or any(fnmatchcase(name, pattern) for pattern in only)]
    if not names:
        raise UserError(f"families: none matches {', '.join(only)}; they are the model types of AutoModelForCausalLM")
    with _folder(keep) as place:
        for name in names:
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as work:
                yield _one(name, place / name, Path(work), ways, began)


def _one(name: str, folder: Path, work: Path, ways: Ways, began: float) -> Family:
    def ended(model: str, status: str, layout: str = "", notes: Sequence[str] = ()) -> Family:
        return Family(name, model, status, layout, tuple(notes), time.perf_counter() - began)

    try:
        made = tiny_model(name)
        made.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        model = type(made).__name__
        del made
    except ValueError as error:
        return ended("", FAILED, notes=[f"not built: {_words(error)}"])
    except Exception as error:  # noqa: BLE001  # whatever the library raises for a class of its own
        return ended("", REFUSED, notes=[f"transformers cannot build it here: {_words(error)}"])
    try:
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  # as above
        return ended(model, REFUSED, notes=[f"transformers cannot load what it saved: {_words(error)}"])
    found: list[Finding] = []
    try:
        found += findings(folder)
        if not _reason(found, "load"):
            found += commanded(folder, work, ways.fit, ways.generate, judged=_reason(found, "rows") is None)
    except Exception as error:  # a traceback is what this looks for
        log.debug("%s", name, exc_info=True)
        found.append(Finding("traceback", problem=f"{type(error).__name__}: {_words(error)}"))
    problems = [
        f"{one.check}: {one.problem or one.reason}"
        for one in found
        if one.problem or (one.check in MUST and one.reason)
    ]
    reasons = [f"{one.check}: {one.reason}" for one in found if one.reason and one.check not in MUST]
    layout = next((one.check.removeprefix("auto is ") for one in found if one.check.startswith("auto is ")), "")
    status = (
        FAILED if problems else REFUSED if _reason(found, "load") else NO_JUDGE if _reason(found, "rows") else EQUAL
    )
    return ended(model, status, layout, [*problems, *reasons])


def _reason(found: Sequence[Finding], check: str) -> str | None:
    return next((one.reason for one in found if one.check == check and one.reason), None)


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def summary(done: Sequence[Family]) -> str:
    """How many families there are of each status."""
    counts = Counter(one.status for one in done)
    return f"{len(done)} families: " + ", ".join(f"{counts[status]} {status}" for status in STATUSES)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)
