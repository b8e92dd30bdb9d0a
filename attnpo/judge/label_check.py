"""Whether the verdict position is the verdict's: measured before a judge pass is paid for, said once, and stored."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from attnpo.judge.base import CAPTURE_VERSION, JudgePrompt, LoadedJudge
from attnpo.judge.judge import RunJudge
from attnpo.judge.label_mass import LabelMass, measure_labels
from attnpo.judge.settings import STOP
from attnpo.schema import PreferencePair, UserError, digest
from attnpo.system.files import read_record, write_record
from attnpo.system.store import Store

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
