"""Share of the probability at the verdict position that is on the judge's labels, measured before a judge pass.

The verdict position is the verdict's where that share is near 1. A judge that would begin with a reasoning trace or
with "The better answer is" has its verdict elsewhere, and its attention at this position is about something else.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from attnpo.judge.base import CAPTURE_VERSION, JudgeModel, JudgePrompt, JudgeReading, LoadedJudge
from attnpo.judge.judge import RunJudge
from attnpo.judge.settings import STOP
from attnpo.schema import PreferencePair, UserError, digest
from attnpo.system.files import read_record, write_record
from attnpo.system.store import Store

TOP = 3
"""Tokens that are named at most; more of them tell no more of what the judge is about to write."""


@dataclass(frozen=True)
class LabelMass:
    """Mean probability of both labels together over the first ``prompts`` prompts, between 0 and 1.

    ``written``: the texts that the judge would write, most likely tokens alone, with the number of prompts; the most
    frequent first.
    """

    share: float
    prompts: int
    written: tuple[tuple[str, int], ...]

    def numbers(self) -> dict[str, object]:
        """Returns all of it as plain data."""
        return {**asdict(self), "written": [list(one) for one in self.written]}

    def text(self) -> str:
        """Returns the share with what the judge would write, for the log."""
        return (
            f"judge: {100 * self.share:.3g} % of the probability at the verdict position is on its two labels (mean of "
            f"{self.prompts} prompts); it would write {in_words(self.written, self.prompts)}"
        )

    def problem(self, minimum: float) -> str | None:
        """Returns what is wrong below ``minimum`` and which options help, in words; None from there on."""
        if self.share >= minimum:
            return None
        return (
            f"the judge puts {100 * self.share:.3g} % of its probability on its labels, less than the "
            f"{100 * minimum:.3g} % of judge.min_label_mass, and would write {in_words(self.written, self.prompts)}: "
            "the attention that is read is not that of a verdict. What helps: thinking switched off "
            "(judge.chat_template_kwargs), its reasoning written first (judge.trace), the beginning of its reply up to "
            "the letter (judge.prefill), another wording (judge=..., judge.template_file), the letters that it does "
            "write (judge.labels)"
        )


def measure_labels(
    judge: JudgeModel, prompts: Sequence[Sequence[int]], label_ids: tuple[int, int], decode: Callable[[int], str]
) -> LabelMass:
    """Returns the mass on ``label_ids`` after ``prompts`` (at least one), read in the judge's full depth."""
    return mass_of(judge.read(prompts, layers=(), verdict=True, label_ids=label_ids), decode)


def mass_of(readings: Sequence[JudgeReading], decode: Callable[[int], str]) -> LabelMass:
    """Returns the same of readings that have verdicts. ValueError for one that has none."""
    masses = [reading.label_mass for reading in readings]
    tokens = [reading.verdict_token for reading in readings]
    shares = [mass for mass in masses if mass is not None]
    if not readings or len(shares) < len(readings):
        raise ValueError("expected readings with verdicts")
    return LabelMass(sum(shares) / len(shares), len(readings), written(tokens, decode))


def written(tokens: Iterable[int | None], decode: Callable[[int], str]) -> tuple[tuple[str, int], ...]:
    """Returns the most frequent of ``tokens`` as text with their counts; equally frequent ones as they first come."""
    counts = Counter(token for token in tokens if token is not None)
    return tuple((decode(token), count) for token, count in counts.most_common(TOP))


def in_words(texts: Sequence[tuple[str, int]], prompts: int) -> str:
    """Returns what would be written in how many of the prompts."""
    return ", ".join(f"{text!r} ({count} of {prompts})" for text, count in texts) or "unknown tokens"


log = logging.getLogger(__name__)

FOLDER = "label_mass"
PAIRS = 16
"""Pairs whose two prompts are measured. The mean has a standard error of 0.125 at worst: masses of 0 and 1 alone."""
NOT_MEASURED = "judge: the store has weights of all pairs, but no sound measurement of the judge's labels on these"


@dataclass(frozen=True)
class LabelCheck:
    """Measurement of a run's judge on the first pairs it can be shown, in the store under judge, prompts and pairs.

    Skips pairs that cannot be shown; the store's key names only the pairs that were measured.
    """

    judge: RunJudge
    store: Store

    def known(self, pairs: Sequence[PreferencePair]) -> LabelMass | None:
        """Returns what the store has of the first of ``pairs``; None where they were not measured."""
        return self._read_stored(self._find_shown(pairs))

    def _read_stored(self, shown: Sequence[JudgePrompt]) -> LabelMass | None:
        record = read_record(self._path(shown))
        if record is None:
            return None
        texts = tuple((str(text), int(count)) for text, count in record["written"])
        return LabelMass(float(record["share"]), int(record["prompts"]), texts)

    def recall(self, load: Callable[[], LoadedJudge], pairs: Sequence[PreferencePair]) -> None:
        """Holds weights that are all stored against the measurement of them, which the store may lack.

        It does where the record is damaged or was not copied along, or other pairs were first. With stop ``load`` then
        gives the judge to measure again; with warn a line says that nothing is known.
        """
        shown = self._find_shown(pairs)
        mass = self._read_stored(shown)
        if mass is not None:
            self.hold(mass)
        elif shown and not self._stops:
            log.info("%s, and judge.low_label_mass=warn does not measure anew", NOT_MEASURED)
        elif shown:
            log.info("%s: loading the judge to measure (judge.low_label_mass=warn goes on without)", NOT_MEASURED)
            self.before(load(), pairs)

    def before(self, judge: LoadedJudge, pairs: Sequence[PreferencePair]) -> None:
        """Measures on the first of ``pairs`` that can be shown, unless that is stored, and says what came out.

        UserError below ``judge.min_label_mass`` where ``judge.low_label_mass`` is stop, and then also for labels that
        cannot be read at all; with warn both are warnings.
        """
        shown = self._find_shown(pairs)
        mass = self._read_stored(shown)
        if mass is None:
            try:
                mass = self._measure(judge, shown)
            except UserError as unread:
                if self._stops:
                    raise
                log.warning("the probability of the judge's labels was not measured: %s", unread)
            if mass is None:
                return
            self._keep(shown, mass)
        self.hold(mass)

    @property
    def _stops(self) -> bool:
        return self.judge.settings.low_label_mass == STOP

    def hold(self, mass: LabelMass) -> None:
        """Logs the measurement, with a warning where it is low; UserError there where low_label_mass is stop."""
        problem = mass.problem(self.judge.settings.min_label_mass)
        if problem is not None and self._stops:
            raise UserError(f"{problem}. judge.low_label_mass=warn goes on all the same")
        log.info("%s", mass.text())
        if problem is not None:
            log.warning("warning: %s", problem)

    def _find_shown(self, pairs: Sequence[PreferencePair]) -> list[JudgePrompt]:
        """Builds the prompts, two a pair, of the first PAIRS of ``pairs`` that the judge can be shown."""
        found: list[JudgePrompt] = []
        for pair in pairs:
            with suppress(UserError):
                found += self.judge.prompts.build(pair)
            if len(found) == 2 * PAIRS:
                break
        return found

    def _measure(self, judge: LoadedJudge, shown: Sequence[JudgePrompt]) -> LabelMass | None:
        """None when no pair can be shown to the judge."""
        rounds = [prompt.input_ids for prompt in shown]
        return measure_labels(judge.model, rounds, self.judge.prompts.label_ids, self.judge.written) if rounds else None

    def _keep(self, shown: Sequence[JudgePrompt], mass: LabelMass) -> None:
        path = self._path(shown)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_record(path, mass.numbers())
        except OSError as error:
            raise UserError(
                f"store: the measurement of the judge's labels cannot be written to {path.parent} ({error}): make room "
                "there, or name another folder with store=FOLDER"
            ) from error

    def _path(self, shown: Sequence[JudgePrompt]) -> Path:
        key = {
            "judge": self.judge.fingerprint(),
            "prompts": self.judge.prompts.fingerprint(),
            "pairs": [prompt.pair_id for prompt in shown[::2]],
            "code": CAPTURE_VERSION,
        }
        return Path(self.store.root) / FOLDER / f"{digest(key)[:20]}.json"
