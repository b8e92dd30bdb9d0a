"""Whether the verdict position is the verdict's: measured before a judge pass is paid for, said once, and stored."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from attnpo.files import read_record, write_record
from attnpo.judging import JudgePrompt
from attnpo.runs.judges import RunJudge
from attnpo.runs.settings import STOP
from attnpo.schema import PreferencePair, UserError, digest
from attnpo.text.judge_template import JudgePrompts
from attnpo.weights.base import Tools
from attnpo.weights.cache import Store
from attnpo.weights.capture import CAPTURE_VERSION
from attnpo.weights.label_mass import LabelMass, measured

log = logging.getLogger(__name__)

FOLDER = "label_mass"
PAIRS = 16
"""Pairs whose two prompts are measured. The mean has a standard error of 0.125 at worst: masses of 0 and 1 alone."""


@dataclass(frozen=True)
class LabelCheck:
    """The measurement of a run's judge on its first pairs, kept in the store under the judge, its prompts and these."""

    judge: RunJudge
    store: Store

    def known(self, pairs: Sequence[PreferencePair]) -> LabelMass | None:
        """What the store has of the first of ``pairs``; None where they were not measured."""
        record = read_record(self._path(pairs))
        if record is None:
            return None
        texts = tuple((str(text), int(count)) for text, count in record["written"])
        return LabelMass(float(record["share"]), int(record["prompts"]), texts)

    def before(self, tools: Tools, pairs: Sequence[PreferencePair]) -> None:
        """Measures on the first of ``pairs`` that can be shown, unless that is stored, and says what came out.

        UserError below ``judge.min_label_mass`` where ``judge.low_label_mass`` is stop, and then also for labels that
        cannot be read at all; with warn both are warnings.
        """
        mass = self.known(pairs)
        if mass is None:
            try:
                mass = self._measure(tools, pairs)
            except UserError as unread:
                if self._stops:
                    raise
                log.warning("the probability of the judge's labels was not measured: %s", unread)
            if mass is None:
                return
            self._keep(pairs, mass)
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

    def _measure(self, tools: Tools, pairs: Sequence[PreferencePair]) -> LabelMass | None:
        """None when no pair can be shown to the judge."""
        assert tools.judge is not None
        prompts = self.judge.prompts
        rounds = [prompt.input_ids for both in islice(_built(prompts, pairs), PAIRS) for prompt in both]
        return measured(tools.judge, rounds, prompts.label_ids, self.judge.written) if rounds else None

    def _keep(self, pairs: Sequence[PreferencePair], mass: LabelMass) -> None:
        path = self._path(pairs)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_record(path, mass.numbers())
        except OSError as error:
            raise UserError(
                f"store: the measurement of the judge's labels cannot be written to {path.parent} ({error}): make room "
                "there, or name another folder with store=FOLDER"
            ) from error

    def _path(self, pairs: Sequence[PreferencePair]) -> Path:
        key = {
            "judge": self.judge.fingerprint(),
            "prompts": self.judge.prompts.fingerprint(),
            "pairs": [pair.pair_id for pair in pairs[:PAIRS]],
            "code": CAPTURE_VERSION,
        }
        return Path(self.store.root) / FOLDER / f"{digest(key)[:20]}.json"


def _built(prompts: JudgePrompts, pairs: Sequence[PreferencePair]) -> Iterator[tuple[JudgePrompt, JudgePrompt]]:
    """The prompts of those ``pairs`` that the judge can be shown."""
    for pair in pairs:
        with suppress(UserError):
            yield prompts.build(pair)
