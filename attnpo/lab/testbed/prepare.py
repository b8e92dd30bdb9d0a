"""One call from knobs to folders: a model folder and a data folder, content-addressed and built at most once.

A second base, another model's judge, is described beside them and built by a call of its own, when it is asked for.

The base is keyed by grammar, recipe, seed and code version; the pairs by the base's key and their own recipe, so
asking for another number of pairs trains nothing again. A folder is built beside its place and renamed into it
when complete and on the disk, so a half-built one is never seen and two processes cannot spoil each other's work. It
holds the digests of its files, which are compared before every use: one that has changed is moved aside and built anew.
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

# Raised by hand when the same recipe would give another base or other pairs. It does not follow from a digest of the
# sources, because a base takes minutes to train and an edit that leaves it as it is must not make it train anew.
# tests/lab/testbed/test_versions.py fails when that code changes, until somebody has decided.
CODE_VERSION = "1"
REPORT = "testbed.json"
MADE_FROM = "made_from"  # in the report of pairs: what their base was


@dataclass(frozen=True)
class Testbed:
    """Testbed by its knobs; `seed` is the base's seed. `second` None: there is no second base to ask for."""

    __test__ = False  # not a test class, whatever its name says to pytest

    grammar: Grammar = field(default_factory=Grammar)
    base: BaseRecipe = field(default_factory=BaseRecipe)
    pairs: PairRecipe = field(default_factory=PairRecipe)
    seed: int = 0
    second: SecondRecipe | None = None

    def base_key(self) -> str:
        """Returns identity of the base model."""
        return _base_key(self.grammar, self.base, self.seed)

    def data_key(self) -> str:
        """Returns identity of the pairs, which includes that of their base."""
        return _key({"base": self.base_key(), "pairs": asdict(self.pairs)})

    def prepare(self, root: Path) -> BuiltFolders:
        """Returns the model and data folders under `root`, built where missing or changed since."""
        model_path, data_path = root / f"base-{self.base_key()}", root / f"data-{self.data_key()}"
        old_base = _ensure(model_path, "base", lambda folder: _build_base(self.grammar, self.base, self.seed, folder))
        old_data = _ensure(data_path, "pairs", lambda folder: self._build_pairs(model_path, folder), model_path)
        report: dict[str, object] = {
            "digest": self.grammar.digest(),
            "base_key": self.base_key(),
            "data_key": self.data_key(),
            "base": _read_base(model_path),
            "pairs": _read(data_path),
        }
        return BuiltFolders(model_path, data_path, report, reused=old_base and old_data)

    def prepare_judge(self, root: Path) -> PreparedJudge:
        """Returns the second base's folder, as ``prepare`` the first. UserError when `second` is None."""
        if self.second is None:
            from attnpo.schema import UserError  # brings torch

            raise UserError("prepare.second is null, so there is no second base that could judge: describe one there")
        recipe, seed = self.second.base, self.seed + self.second.seed_offset
        path = root / f"base-{_base_key(self.grammar, recipe, seed)}"
        reused = _ensure(path, "second base", lambda folder: _build_base(self.grammar, recipe, seed, folder))
        return PreparedJudge(path, _read_base(path), reused)

    def _build_pairs(self, model_path: Path, folder: Path) -> Mapping[str, object]:
        from attnpo.lab.testbed.pairs import write_pairs

        model, tokenizer = load_base(model_path)
        return write_pairs(model, tokenizer, self.grammar, self.pairs, folder)


def load_base(model_path: Path) -> "tuple[LlamaForCausalLM, PreTrainedTokenizerFast]":
    """Returns the base in evaluation mode and its tokenizer."""
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    return (
        LlamaForCausalLM.from_pretrained(model_path, trust_remote_code=False),
        PreTrainedTokenizerFast.from_pretrained(model_path, trust_remote_code=False),
    )


def _base_key(grammar: Grammar, recipe: BaseRecipe, seed: int) -> str:
    return _key({"grammar": grammar.digest(), "base": recipe.identity(), "seed": seed})


def _build_base(grammar: Grammar, recipe: BaseRecipe, seed: int, folder: Path) -> Mapping[str, object]:
    from attnpo.lab.testbed.pretrain import build_base  # transformers takes seconds to import

    return build_base(grammar, recipe, folder, seed=seed)


def _read_base(folder: Path) -> dict[str, object]:
    report = _read(folder)
    if report.get("gate_passed") is False:
        logger.warning("testbed base %s did not pass its judge gate; its studies prove little", folder.name)
    return report


def _key(content: Mapping[str, object]) -> str:
    text = json.dumps({"code": CODE_VERSION, **content}, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def _read(folder: Path) -> dict[str, object]:
    content: dict[str, object] = parse_json((folder / REPORT).read_text(encoding="utf-8"))
    return content


def _ensure(target: Path, what: str, build: Callable[[Path], Mapping[str, object]], base: Path | None = None) -> bool:
    """Builds ``target`` (from ``base``) beside its place and renames it in; True where it was there as built."""
    aside = None
    while target.exists():
        problem = _problem(target, base)
        if problem is None:
            logger.info("testbed %s: reused from %s", what, target)
            return True
        aside = _out_of_the_way(target, what, problem, base)
    target.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    # Not a TemporaryDirectory: on success the folder lives on under its final name.
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        report = {**build(scratch), **({} if base is None else {MADE_FROM: _identity(base)})}
        (scratch / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        write_checksums(scratch)
        for path in (*scratch.rglob("*"), scratch):
            apply_umask(path)
            fsync_path(path)
        _move_in(scratch, target, what, base)
        fsync_path(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    logger.info("testbed %s: built in %.0f s, %s", what, time.monotonic() - started, target)
    if aside is not None:
        _compare(aside, target, what)
    return False


def _problem(target: Path, base: Path | None) -> str | None:
    """Returns why a folder is not what was built, or what would be built now; None where it is."""
    problem = describe_change(target)
    if problem is None and base is not None and _read(target).get(MADE_FROM) != _identity(base):
        return f"it was made from another {base.name}"
    return problem


def _identity(folder: Path) -> str:
    """Returns the digest of all that was built in a folder but its report, which tells how long it took."""
    files = {name: digest for name, digest in read_checksums(folder).items() if name != REPORT}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _out_of_the_way(target: Path, what: str, problem: str, base: Path | None) -> Path | None:
    """Returns where the damaged folder went, with a warning; None where another process was faster."""
    try:
        aside = rename_damaged(target)
    except FileNotFoundError:
        return None
    except OSError as error:
        from attnpo.schema import UserError  # brings torch

        raise UserError(
            f"testbed {what}: {target} is not as it was built ({problem}) and cannot be moved aside ({error}): remove "
            "it and run again, or name another folder with store=FOLDER"
        ) from error
    if _problem(aside, base) is None:  # another process has moved the damaged one, and finished, since we looked
        aside.rename(target)
        return None
    logger.warning(
        "testbed %s: %s is not as it was built (%s): moved to %s, and made anew", what, target, problem, aside.name
    )
    return aside


def _compare(aside: Path, target: Path, what: str) -> None:
    new = read_checksums(target)
    before = read_checksums(aside) or {name: file_digest(aside / name) for name in new if (aside / name).is_file()}
    other = sorted(name for name in new.keys() & before.keys() - {REPORT} if new[name] != before[name])
    if other:
        logger.warning(
            "testbed %s: made anew, %s differs from what was there before in %s (another version of torch, number of "
            "threads or kind of machine, or it was damaged): what ran on it before was another run",
            what,
            target.name,
            ", ".join(other),
        )


def _move_in(scratch: Path, target: Path, what: str, base: Path | None) -> None:
    try:
        scratch.rename(target)
    except OSError as error:
        if (problem := _problem(target, base)) is not None:
            from attnpo.schema import UserError  # brings torch

            raise UserError(
                f"testbed {what}: cannot move the finished folder to {target} ({error}), where something else lies "
                f"({problem}): remove it and run again"
            ) from error
        logger.info("testbed %s: another process finished %s first; using it", what, target)
