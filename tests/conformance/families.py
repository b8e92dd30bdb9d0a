"""Families (`python -m tests.conformance families`): every causal LM, tiny, through loader, numbers and commands.

A family has one outcome: equal, policy only, refused (with the reason, in the words a user gets), not built (what
transformers itself cannot build or load again here) or FAIL. What could not be run is a FAIL.
"""

import logging
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import shorten
from typing import TextIO

import torch
from transformers import AutoModelForCausalLM

from attnpo.schema import UserError
from tests.conformance.family_checks import Finding, findings
from tests.conformance.family_commands import into, run_commands
from tests.conformance.family_models import families, tiny_model
from tests.conformance.family_table import EQUAL, FAILED, NO_JUDGE, NOT_BUILT, REFUSED, Family
from tests.conformance.family_tokenizer import tiny_tokenizer, write_pairs

log = logging.getLogger(__name__)

PAIRS = "pairs"
"""The folder beside models that stay, with pairs for them."""
MUST = ("stop", "resume", "export", "generate")  # which refuse a model that fit has taken for no reason


def matching(only: Sequence[str]) -> list[str]:
    """The names of the families that match a pattern of ``only``; all without one.

    Raises:
        UserError: none does.
    """
    names = [name for name in families() if not only or any(fnmatchcase(name, pattern) for pattern in only)]
    if not names:
        raise UserError(f"families: none matches {', '.join(only)}; they are the model types of AutoModelForCausalLM")
    return names


def verify_families(only: Sequence[str] = (), keep: Path | None = None) -> Iterator[Family]:
    """Yields the outcome of every family whose name matches a pattern of ``only`` (all by default), as it is done.

    ``keep``: a folder where the models stay, each with its tokenizer, and a few pairs; by default a temporary one.
    One CPU thread computes: several wait for each other longer than models so small need. What models and commands
    say of a family that fails stays in a temporary folder.

    Raises:
        UserError: no family matches.
    """
    logs = Path(tempfile.gettempdir()) / "attnpo-families"
    names = matching(only)
    with _folder(keep) as place, _one_thread():
        logs.mkdir(parents=True, exist_ok=True)
        for name in names:
            began = time.perf_counter()
            file = logs / f"{name}.log"
            with tempfile.TemporaryDirectory() as work, file.open("w+", encoding="utf-8") as said:
                family = _one(name, place / name, Path(work), said)
            if family.status != FAILED:
                file.unlink()
            told = [f"its log: {file}"] if family.status == FAILED else []
            yield family.took(time.perf_counter() - began, told)


def _one(name: str, folder: Path, work: Path, said: TextIO) -> Family:
    model = ""
    try:
        with into(said):
            made = tiny_model(name)
            model = type(made).__name__
            made.save_pretrained(folder)
            tiny_tokenizer().save_pretrained(folder)
            del made
            AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  # whatever the library raises for a class of its own
        did = "load what it saved" if model else "build it here"
        return Family(name, model, NOT_BUILT, notes=(f"transformers cannot {did}: {_words(error)}",))
    found: list[Finding] = []
    try:
        with into(said):
            found += findings(folder)
        if not _reason(found, "load") and not _reason(found, "step"):
            found += run_commands(folder, work, said, judged=_reason(found, "rows") is None)
    except Exception as error:  # noqa: BLE001  # a traceback is what this looks for
        said.write(traceback.format_exc())
        found.append(Finding("traceback", problem=f"{type(error).__name__}: {_words(error)}"))
    problems = [
        f"{one.check}: {one.problem or one.reason}"
        for one in found
        if one.problem or (one.check in MUST and one.reason)
    ]
    reasons = [f"{one.check}: {one.reason}" for one in found if one.reason and one.check not in MUST]
    refused = any(_reason(found, check) for check in ("load", "step", "layouts", "fit"))
    status = FAILED if problems else REFUSED if refused else NO_JUDGE if _reason(found, "rows") else EQUAL
    layout, read = (_after(found, word) for word in ("auto is ", "read by "))
    notes = tuple(note.replace(str(folder), name) for note in (*problems, *reasons))
    return Family(name, model, status, layout, read, notes)


def _reason(found: Sequence[Finding], check: str) -> str | None:
    return next((one.reason for one in found if one.check == check and one.reason), None)


def _after(found: Sequence[Finding], word: str) -> str:
    return next((one.check.removeprefix(word) for one in found if one.check.startswith(word)), "")


def _words(error: Exception) -> str:
    return shorten(str(error), 200, placeholder=" ...") or type(error).__name__


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        if keep.exists() and any(keep.iterdir()) and not (keep / PAIRS).is_dir():
            raise UserError(f"families: keep={keep} holds other files, which models would replace: name a new folder")
        write_pairs(keep / PAIRS)
        yield keep
        return
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
