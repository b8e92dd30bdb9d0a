"""Builds the testbed's base model and preference pairs in content-addressed folders, at most once each.

A second base can be configured as a judge for the first; it is built by a separate call on demand.

The key of the base covers grammar, recipe, seed and code version. The key of the pairs covers the base's key and the
pair recipe, so requesting a different number of pairs does not retrain the base. Folders are built under a temporary
name and renamed once complete and flushed to disk. No process ever sees an incomplete folder, and processes cannot
interfere with each other. Each folder contains digests of its files, which are verified before every use; a changed
folder is moved aside and rebuilt.
"""

import hashlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.recipes import BaseRecipe, PairRecipe, SecondRecipe
from attnpo.run.components import BuiltFolders, PreparedJudge
from attnpo.system.files import (
    apply_umask,
    describe_change,
    file_digest,
    fsync_path,
    parse_json,
    read_checksums,
    rename_damaged,
    write_checksums,
)

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

# Increase when the same recipe would give another base or other pairs. It is not derived from a digest of the sources,
# because a base takes minutes to train and a harmless edit must not train it again.
# tests/lab/testbed/test_versions.py fails when that code changes, until somebody has decided.
CODE_VERSION = "1"
REPORT = "testbed.json"
MADE_FROM = "made_from"  # in the report of pairs: identity of their base


@dataclass(frozen=True)
class Testbed:
    """Settings of a testbed; `seed` is the base's seed, and `second` is None if there is no second base."""

    __test__ = False  # keeps pytest from collecting it as a test class

    grammar: Grammar = field(default_factory=Grammar)
    base: BaseRecipe = field(default_factory=BaseRecipe)
    pairs: PairRecipe = field(default_factory=PairRecipe)
    seed: int = 0
    second: SecondRecipe | None = None

    def base_key(self) -> str:
        """Returns the key of the base model."""
        return _base_key(self.grammar, self.base, self.seed)

    def data_key(self) -> str:
        """Returns the key of the pairs, which covers the base's key."""
        return _make_key({"base": self.base_key(), "pairs": asdict(self.pairs)})

    def prepare(self, root: Path) -> BuiltFolders:
        """Returns the model and data folders under `root`; builds those that are missing or have changed."""
        model_path, data_path = root / f"base-{self.base_key()}", root / f"data-{self.data_key()}"
        old_base = _ensure_built(
            model_path, "base", lambda folder: _build_base(self.grammar, self.base, self.seed, folder)
        )
        old_data = _ensure_built(data_path, "pairs", lambda folder: self._build_pairs(model_path, folder), model_path)
        report: dict[str, object] = {
            "digest": self.grammar.digest(),
            "base_key": self.base_key(),
            "data_key": self.data_key(),
            "base": _read_base(model_path),
            "pairs": _read_report(data_path),
        }
        return BuiltFolders(model_path, data_path, report, reused=old_base and old_data)

    def prepare_judge(self, root: Path) -> PreparedJudge:
        """Returns the second base's folder, built if missing or changed.

        Raises:
            UserError: `second` is None.
        """
        if self.second is None:
            from attnpo.schema import UserError  # brings torch

            raise UserError("prepare.second is null, so there is no second base to use as a judge: set prepare.second")
        recipe, seed = self.second.base, self.seed + self.second.seed_offset
        path = root / f"base-{_base_key(self.grammar, recipe, seed)}"
        reused = _ensure_built(path, "second base", lambda folder: _build_base(self.grammar, recipe, seed, folder))
        return PreparedJudge(path, _read_base(path), reused)

    def _build_pairs(self, model_path: Path, folder: Path) -> Mapping[str, object]:
        from attnpo.lab.testbed.pairs import write_pairs

        model, tokenizer = load_base(model_path)
        return write_pairs(model, tokenizer, self.grammar, self.pairs, folder)


def load_base(model_path: Path) -> "tuple[LlamaForCausalLM, PreTrainedTokenizerFast]":
    """Loads the base, in evaluation mode, and its tokenizer."""
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    return (
        LlamaForCausalLM.from_pretrained(model_path, trust_remote_code=False),
        PreTrainedTokenizerFast.from_pretrained(model_path, trust_remote_code=False),
    )


def _base_key(grammar: Grammar, recipe: BaseRecipe, seed: int) -> str:
    return _make_key({"grammar": grammar.digest(), "base": recipe.identity(), "seed": seed})


def _build_base(grammar: Grammar, recipe: BaseRecipe, seed: int, folder: Path) -> Mapping[str, object]:
    from attnpo.lab.testbed.pretrain import build_base  # transformers takes seconds to import

    return build_base(grammar, recipe, folder, seed=seed)


def _read_base(folder: Path) -> dict[str, object]:
    report = _read_report(folder)
    if report.get("gate_passed") is False:
        logger.warning(
            "testbed base %s: judge accuracy is below base.judge_gate, so study results are not meaningful", folder.name
        )
    return report


def _make_key(content: Mapping[str, object]) -> str:
    text = json.dumps({"code": CODE_VERSION, **content}, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def _read_report(folder: Path) -> dict[str, object]:
    content: dict[str, object] = parse_json((folder / REPORT).read_text(encoding="utf-8"))
    return content


def _ensure_built(
    target: Path, what: str, build: Callable[[Path], Mapping[str, object]], base: Path | None = None
) -> bool:
    """Builds ``target`` (from ``base``) under a temporary name and renames it; returns True if it already existed."""
    aside = None
    while target.exists():
        problem = _find_problem(target, base)
        if problem is None:
            logger.info("testbed %s: reused from %s", what, target)
            return True
        aside = _move_aside(target, what, problem, base)
    target.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    # Not a TemporaryDirectory, because the folder is renamed on success.
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        report = {**build(scratch), **({} if base is None else {MADE_FROM: _content_digest(base)})}
        (scratch / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        write_checksums(scratch)
        for path in (*scratch.rglob("*"), scratch):
            apply_umask(path)
            fsync_path(path)
        _move_into_place(scratch, target, what, base)
        fsync_path(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    logger.info("testbed %s: built in %.0f s, %s", what, time.monotonic() - started, target)
    if aside is not None:
        _warn_if_different(aside, target, what)
    return False


def _find_problem(target: Path, base: Path | None) -> str | None:
    """Returns the reason why a folder is damaged or outdated; None if it is intact."""
    problem = describe_change(target)
    if problem is None and base is not None and _read_report(target).get(MADE_FROM) != _content_digest(base):
        return f"it was built from a different {base.name}"
    return problem


def _content_digest(folder: Path) -> str:
    """Returns a digest of a folder's files, except for its report, which contains the build time."""
    files = {name: digest for name, digest in read_checksums(folder).items() if name != REPORT}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _move_aside(target: Path, what: str, problem: str, base: Path | None) -> Path | None:
    """Moves a damaged folder aside with a warning; returns its new path, or None if another process replaced it."""
    try:
        aside = rename_damaged(target)
    except FileNotFoundError:
        return None
    except OSError as error:
        from attnpo.schema import UserError  # brings torch

        raise UserError(
            f"testbed {what}: {target} was changed since it was built ({problem}) and cannot be moved aside ({error}): "
            "remove it and run again, or choose a different folder with store=FOLDER"
        ) from error
    if _find_problem(aside, base) is None:  # another process has replaced the damaged folder in the meantime
        aside.rename(target)
        return None
    logger.warning(
        "testbed %s: %s was changed since it was built (%s): moved it to %s and rebuilding",
        what,
        target,
        problem,
        aside.name,
    )
    return aside


def _warn_if_different(aside: Path, target: Path, what: str) -> None:
    new = read_checksums(target)
    before = read_checksums(aside) or {name: file_digest(aside / name) for name in new if (aside / name).is_file()}
    other = sorted(name for name in new.keys() & before.keys() - {REPORT} if new[name] != before[name])
    if other:
        logger.warning(
            "testbed %s: the rebuilt %s differs from the previous one in %s (because of a different torch version, "
            "number of threads or machine, or because it was damaged): earlier runs on it are not comparable",
            what,
            target.name,
            ", ".join(other),
        )


def _move_into_place(scratch: Path, target: Path, what: str, base: Path | None) -> None:
    try:
        scratch.rename(target)
    except OSError as error:
        if (problem := _find_problem(target, base)) is not None:
            from attnpo.schema import UserError  # brings torch

            raise UserError(
                f"testbed {what}: cannot move the finished folder to {target} ({error}), because something else is "
                f"there ({problem}): remove it and run again"
            ) from error
        logger.info("testbed %s: another process finished %s first; using it", what, target)
