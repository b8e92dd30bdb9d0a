"""Every statement of the paper's theory and of ours: holds, fails or says nothing, and the number that decides it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from experiments.theory.cases import Reads
from experiments.theory.extremes import largest, least
from experiments.theory.paper_bounds import TRIVIAL, PaperRow
from experiments.theory.paper_numbers import CONSTANTS, TABLE
from experiments.theory.properties import Ratio
from experiments.theory.study import Study
from experiments.theory.tightness import exponent

EXACT = 1e-9  # errors below this count as none: all is float64 and solved to about 1e-12
PAPER, OURS = "paper", "ours"


class Verdict(Enum):
    """Verdict on a statement; OPEN: true of some problems and not of others.

    NOTHING: true whatever the policies are, or about a policy that does not exist.
    """

    HOLDS = "holds"
    FAILS = "fails"
    OPEN = "open"
    NOTHING = "says nothing"


@dataclass(frozen=True)
class Statement:
    """One row: its section among the paper's statements, whose it is, the verdict, and ``number``, read as ``by``."""

    section: str
    name: str
    source: str
    verdict: Verdict
    by: str
    number: float


def statements(study: Study) -> list[Statement]:
    """Returns all statements in the order of tables.md: the paper's by section, then ours."""
    parts = (_objectives, _properties, _assumptions, _bounds, _theorem, _gradient, _note, _published, _ours)
    return [row for part in parts for row in part(study)]


# ------------------------------------------------------------------------------------------------ what decides


def exact(section: str, name: str, error: float, by: str = "largest error", source: str = PAPER) -> Statement:
    """Returns a statement that holds where ``error`` is none."""
    return Statement(section, name, source, _held(error < EXACT), by, error)


def differs(section: str, name: str, error: float, by: str, source: str = PAPER) -> Statement:
    """Returns a statement that two things are not the same: it holds where ``error`` is not none."""
    return Statement(section, name, source, _held(error > EXACT), by, error)


def bounded(section: str, name: str, share: float, source: str = PAPER) -> Statement:
    """Returns a bound, which holds where at most all of it is taken up."""
    return Statement(section, name, source, _held(share <= 1), "largest share of the bound", share)


def informative(section: str, name: str, bound: float, by: str, source: str = PAPER) -> Statement:
    """Returns a bound on a total variation, which says nothing where it is not below the largest one there is."""
    verdict = Verdict.NOTHING if bound >= TRIVIAL else _held(bound < TRIVIAL)
    return Statement(section, name, source, verdict, by, bound)


def above_one(section: str, name: str, ratio: float, by: str, source: str = PAPER) -> Statement:
    """Returns an order, which holds where the ratio is above 1 by more than rounding."""
    return Statement(section, name, source, _held(ratio > 1 + EXACT), by, ratio)


def tendency(section: str, name: str, ratio: Ratio, by: str) -> Statement:
    """Returns an order on every problem.

    It holds where the ratio is above 1 on all of them, and fails where on none.
    """
    verdict = {ratio.count: Verdict.HOLDS, 0: Verdict.FAILS}.get(ratio.above, Verdict.OPEN)
    return Statement(section, name, PAPER, verdict, f"{by}; above 1 on {ratio.above} of {ratio.count}", ratio.mean)


def _held(holds: bool) -> Verdict:
    return Verdict.HOLDS if holds else Verdict.FAILS


# ------------------------------------------------------------------------------------------------ the paper's


def _objectives(study: Study) -> list[Statement]:
    """Returns section 1: J_w, the near-optimum h, and rewards read off it."""
    found, note = study.gradient, study.note
    rows = [
        exact(
            "1", "h is a policy with P~_h = P~_ref exp(r/beta) / Z", largest(row.near_optimum for row in study.paper)
        ),
        exact("1", "h recovers every reward difference", largest(row.error_h for row in study.policies)),
        exact("1", "Z cancels: TwDPO's loss is least at h", found.at_heuristic, "largest gradient at h"),
        differs("1", "P~ is no distribution", least(abs(row.log_mass) for row in note), "least |log of its sum|"),
    ]
    return rows + [
        exact("1", f"h exists, weights {row.weights}", row.highest, "largest residual", "paper assumes")
        for row in study.existence
    ]


def _properties(study: Study) -> list[Statement]:
    """Returns section 2: P1 to P3; ratios of the lowest to the highest third of the weights, each over DPO's."""
    rows = [exact("2", "P1: the reward moves by beta w_t", largest(row.reward_error for row in study.properties))]
    for row in study.properties:
        head, by = f"P2, {row.kind} weights: low weights are freer", "low over high weights, |d|"
        rows += [
            tendency("2", f"{head} at pi*", row.moved_best, by),
            tendency("2", f"{head} at h", row.moved_heuristic, by),
            tendency("2", f"{head} after TwDPO's first step", row.moved_loss_step, by),
        ]
    path, by = study.freedom, "KL over DPO's, lowest / highest weight"
    first, last = path.ratios[0], path.limit
    rows += [
        above_one("2", "P2: more freedom on low weights, at the optimum", float(last[0] / last[-1]), by),
        above_one("2", "P2: more freedom on low weights, first step", float(first[0] / first[-1]), by),
    ]
    for row in study.properties:
        head, moved, carried = f"P3, {row.kind} weights:", "high over low weights, |d|", "high over low weights, |w d|"
        rows += [
            tendency("2", f"{head} high ones move more in TwDPO's first step", row.moved_loss_step.inverse, moved),
            tendency("2", f"{head} high ones move more in J_w's first step", row.moved_objective_step.inverse, moved),
            tendency("2", f"{head} high ones have moved more at pi*", row.moved_best.inverse, moved),
            tendency("2", f"{head} high ones have moved more at h", row.moved_heuristic.inverse, moved),
            tendency("2", f"{head} high ones carry more of the reward at pi*", row.carried_best.inverse, carried),
            tendency("2", f"{head} high ones carry more of the reward at h", row.carried_heuristic.inverse, carried),
        ]
    return rows


def _assumptions(study: Study) -> list[Statement]:
    """Returns section 3: the constants with which A1 and A2 hold."""
    rows = []
    for reads in Reads:
        of = [row for row in study.paper if row.kind == reads.value]
        for row, end in ((of[0], "smallest"), (of[-1], "largest")):
            rows.append(
                Statement(
                    "3",
                    f"A1 and A2, {reads.value} weights, {end} delta {row.delta:.3g}",
                    PAPER,
                    _held(row.constant < float("inf")),
                    "C that pi*, h and DPO need",
                    row.constant,
                )
            )
    return rows


def _bounds(study: Study) -> list[Statement]:
    """Sections 4 to 6: the perturbation and both lemmas, each with the identity it rests on."""
    rows = (*study.paper, study.ending)

    def worst(of: Callable[[PaperRow], float]) -> float:
        return largest(of(row) for row in rows)

    return [
        exact("4", "J_w(pi) = J(pi) - beta E[R]", worst(lambda row: row.perturbation)),
        bounded("4", "|J_w(pi) - J(pi)| <= beta delta C E|y|", worst(lambda row: row.departure.share)),
        exact("5", "J(DPO) - J(pi) = beta KL(pi, DPO)", worst(lambda row: row.regret)),
        bounded("5", "lemma 1: KL(pi*, DPO) <= delta C (E|y| + E|y|)", worst(lambda row: row.lemma_1.share)),
        exact("6", "log h/DPO = log Z_DPO - log Z - R(h)", worst(lambda row: row.ratio)),
        exact("6", "KL(h, DPO) + KL(DPO, h) = E_DPO[R] - E_h[R]", worst(lambda row: row.jeffreys)),
        bounded("6", "lemma 2: KL(h, DPO) <= delta C (E|y| + E|y|)", worst(lambda row: row.lemma_2.share)),
        *_missing(study, "6", "lemma 2"),
    ]


def _theorem(study: Study) -> list[Statement]:
    """Returns section 7: the theorem, whether it says anything, and its rate."""
    rows = [row for row in study.paper if row.kind == Reads.RESPONSE.value]
    small = min((row for row in study.tightness if row.varied == "delta"), key=lambda row: row.value)
    power = exponent(study.tightness)
    share = largest(row.theorem.share for row in (*study.paper, study.ending))
    return [
        bounded("7", "theorem: TV(pi*, h) <= sqrt(delta C / 2) (...)", share),
        *(informative("7", f"theorem at delta {row.delta:.3g}", row.theorem.bound, "bound on TV") for row in rows),
        informative("7", f"theorem at delta {small.value:g}", small.paper.theorem.bound, "bound on TV"),
        Statement("7", "TV(pi*, h) is O(sqrt(delta))", PAPER, _held(power >= 0.5), "power of delta found", power),
        *_missing(study, "7", "theorem"),
    ]


def _missing(study: Study, section: str, name: str) -> list[Statement]:
    """Returns statements on h where there is none: they say nothing."""
    return [
        Statement(section, f"{name}, weights {row.weights}", PAPER, Verdict.NOTHING, "residual of h", row.lowest)
        for row in study.existence
        if row.lowest > EXACT
    ]


def _gradient(study: Study) -> list[Statement]:
    """Returns the statements of section 8."""
    row = study.gradient
    return [
        exact("8", "gradient of TwDPO's loss", row.error, "largest error over largest entry"),
        differs("8", "each score is scaled by its weight", row.unweighted, "least error without the weights"),
        Statement(
            "8",
            "the factor grows as the margin falls",
            PAPER,
            _held(row.rising == 0 and row.factors[0] > row.factors[1] > row.factors[2]),
            "factor, least margin over 0",
            row.factors[0] / row.factors[1],
        ),
    ]


def _note(study: Study) -> list[Statement]:
    """Returns the statements of section 9."""
    note = study.note
    loose = [row for row in study.lemmas if row.reads is Reads.RESPONSE]
    return [
        exact("9", "P of h is P_ref exp(r/beta)/Z'", largest(row.error for row in note)),
        exact("9", "its reward is r up to a constant", largest(row.reward for row in note)),
        exact("9", "pairwise differences stay the same", largest(row.pairs for row in note)),
        exact("9", "lemma 2's identity, so its bound, stays the same", largest(row.lemma_2 for row in note)),
        differs("9", "the expectation is over pi, not over P", least(row.distance for row in note), "least mean TV"),
        differs("9", "the true optimum is not h", least(row.intractable for row in note), "least mean TV"),
        Statement(
            "9",
            "the objective is no KL to an optimum",
            PAPER,
            _held(least(row.lowest for row in loose) < 0),
            "least KL_w / KL",
            least(row.lowest for row in loose),
        ),
        exact("9", "last display as printed", least(row.printed for row in note), "least error"),
        exact(
            "9", "last display with logarithm and beta", largest(row.display for row in note), source="paper, mended"
        ),
        exact(
            "9",
            "C1 is the prompt's, the same for all policies",
            largest(row.constant for row in note),
            "mean range",
            OURS,
        ),
    ]


def _published(study: Study) -> list[Statement]:
    """Returns section 10: the theorem at the paper's own figures, for policies that have hardly moved."""
    del study  # rests on the printed figures alone
    by = f"bound on TV, C {CONSTANTS[0]:g}"
    return [
        informative("10", f"theorem at the weights of {one.model}, {one.side}", one.tv_bound(CONSTANTS[0]), by)
        for one in TABLE
    ]


# ------------------------------------------------------------------------------------------------ ours


def _ours(study: Study) -> list[Statement]:
    """Returns our statements: when h is the optimum, our lemmas and both parts of our theorem."""
    fixed = [row for row in study.policies if row.reads is Reads.POSITION]
    free = [row for row in study.policies if row.reads is Reads.RESPONSE]
    tight = [row for row in study.lemmas if row.reads is Reads.POSITION]
    loose = [row for row in study.lemmas if row.reads is Reads.RESPONSE]
    return [
        _own("position weights: h is the optimum of J_w", largest(row.tv_best_h for row in fixed), "largest TV"),
        _own("response weights: h is the optimum of J_w", largest(row.tv_best_h for row in free), "largest mean TV"),
        _own("response weights: pi* recovers rewards", largest(row.error_best for row in free), "mean error"),
        _own("our lemma 1, any weights", largest(row.identity for row in study.lemmas), "largest error"),
        _own("our lemma 2, sandwich, position weights", largest(row.outside for row in tight), "share outside"),
        _own("our lemma 2, sandwich, response weights", largest(row.outside for row in loose), "share outside"),
        _own("KL_w >= 0, response weights", largest(row.negative for row in loose), "share negative"),
        bounded("ours", "our lemma 2, bound for any weights", largest(row.used for row in study.lemmas), OURS),
        bounded("ours", "our theorem (a), TV(pi*, h)", largest(row.used_a for row in study.policies), OURS),
        bounded("ours", "our theorem (b), TV(h, DPO)", largest(row.used_b for row in study.policies), OURS),
    ]


def _own(name: str, error: float, by: str) -> Statement:
    return exact("ours", name, error, by, OURS)
