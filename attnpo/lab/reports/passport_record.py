"""What a judge's passport says, as plain data."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum

from attnpo.judge.verdicts import JudgeStatistics
from attnpo.lab.analysis.passport import RULE, Accuracy, Calibration, Estimate, Judgement


@dataclass(frozen=True)
class LayerLook:
    """What a layer looks at, and whether the verdict hangs on it.

    ``mass``: attention of the verdict position on the tokens of both answers, mean over rounds; ``first`` and
    ``second``: its parts by place. ``effective``: effective number of finished weights on a response's tokens, and
    ``effective_share`` over their number. ``fall``, ``random``: by how many nats the verdict's log-odds fall without
    the top-weighted tokens and without random ones of the same places, means over shares; ``gain``: their difference,
    at the level that holds for all layers together. None where no token was removed. ``truth``: share of the weights
    on tokens that truly decide, where that is known. ``kept_mass_chosen``, ``kept_mass_rejected``: share of the weights
    that arrives on training tokens. ``lost``: a warning where much of it does not.
    """

    layer: int
    mass: Estimate
    first: float
    second: float
    effective: float
    effective_share: float
    kept_mass_chosen: float
    kept_mass_rejected: float
    lost: str | None = None
    fall: float | None = None
    random: float | None = None
    gain: Estimate | None = None
    truth: float | None = None


@dataclass(frozen=True)
class Cost:
    """What the judge pass over all pairs takes, extrapolated from the sample's ``measured`` prompts by their number.

    ``store``: bytes on disk. ``loading``: seconds to load the judge, once. ``removals``: prompts read with tokens
    removed, which belong to the passport alone.
    """

    pairs: int
    prompts: int
    tokens: int
    seconds: float
    store: int
    measured: int
    loading: float
    removals: int
    device: str


@dataclass(frozen=True)
class Truth:
    """Against a known truth: the share of labels that are wrong, verdicts by the truth, equal weights on what decides.

    A pair is right where the averaged verdict picks the answer that is truly better.
    """

    wrong_labels: Estimate
    accuracy: Estimate
    equal: float


@dataclass(frozen=True)
class Passport:
    """A judge on labelled pairs. Pairs count once, with both orders.

    ``no_label``: verdicts whose most likely token is no label. ``label_mass``: probability of both labels at the
    verdict position, and what its lowest tenth lies below. ``written``: the texts that the judge would write there,
    most likely tokens alone, with the number of prompts.
    ``answer_tokens``: the answers' share of a prompt's tokens, which attention spread evenly would give them.
    ``coverage``, ``source_coverage``: shares of the training tokens, and of the judge's, with a partner.
    ``full``: mean log-odds of the judge's own verdict, the most that can fall. ``rows`` were read, and ``data`` tells
    by reason what became of them before any was judged; ``counts`` what was cut, left out or noticed on the sample.
    """

    judgement: Judgement
    statistics: JudgeStatistics
    accuracy: Accuracy
    calibration: Calibration
    no_label: Estimate
    label_mass: Estimate
    label_mass_low: float
    written: tuple[tuple[str, int], ...]
    answer_tokens: float
    layers: tuple[LayerLook, ...]
    full: float | None
    coverage: float
    source_coverage: float
    cost: Cost
    rows: int
    data: Mapping[str, int]
    counts: Mapping[str, int]
    truth: Truth | None

    def to_json(self) -> dict[str, object]:
        """Plain data; numbers that are not known are null."""
        values = {name: _plain(value) for name, value in asdict(self).items()}
        return {"rule": RULE, **values}


def _plain(value: object) -> object:
    """Returns a value as JSON has it: names of choices, null for what is not finite."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return None if isinstance(value, float) and not math.isfinite(value) else value
