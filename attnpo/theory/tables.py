"""The theory study's results as tables: every claim with the number that decides it, and what it rests on."""

from attnpo.display.page import TableBlock
from attnpo.display.tables import Cell, table_html, table_text
from attnpo.theory.claims import Reads, Study

EXACT = 1e-9  # errors below this count as none: all is float64 and solved to about 1e-12
READ, OURS = "as we read it", "ours"  # whose statement: the paper's as far as it is known here, or our own


def claims(study: Study) -> TableBlock:
    """Every statement, whether it held in the study, and the number that says so."""
    fixed = [row for row in study.policies if row.reads is Reads.POSITION]
    free = [row for row in study.policies if row.reads is Reads.RESPONSE]
    loose = [row for row in study.lemmas if row.reads is Reads.RESPONSE]
    tight = [row for row in study.lemmas if row.reads is Reads.POSITION]
    path = study.freedom
    first, last = path.ratios[0], path.limit
    rows = [
        _claim("h recovers every reward difference", READ, max(row.error_h for row in study.policies), "largest error"),
        _claim("position weights: h is the optimum of J_w", READ, max(row.tv_best_h for row in fixed), "largest TV"),
        _claim(
            "response weights: h is the optimum of J_w", READ, max(row.tv_best_h for row in free), "largest mean TV"
        ),
        _claim("response weights: pi* recovers rewards", READ, max(row.error_best for row in free), "mean error"),
        *(_claim(f"h exists, weights {row.weights}", OURS, row.highest, "largest residual") for row in study.existence),
        _claim("lemma 1, any weights", OURS, max(row.identity for row in study.lemmas), "largest error"),
        _claim("lemma 2, sandwich, position weights", OURS, max(row.outside for row in tight), "share outside"),
        _claim("lemma 2, sandwich, response weights", OURS, max(row.outside for row in loose), "share outside"),
        _claim("KL_w >= 0, response weights", OURS, max(row.negative for row in loose), "share negative"),
        _bound("lemma 2, bound for any weights", max(row.used for row in study.lemmas)),
        _bound("theorem (a), TV(pi*, h)", max(row.used_a for row in study.policies)),
        _bound("theorem (b), TV(h, DPO)", max(row.used_b for row in study.policies)),
        _claim("note: P of h is P_ref exp(r/beta)/Z'", READ, max(row.error for row in study.note), "largest error"),
        _claim("note: P of h is what h samples", OURS, max(row.distance for row in study.note), "largest mean TV"),
        _order("more freedom on low weights, at the optimum", float(last[0] / last[-1])),
        _order("more freedom on low weights, first step", float(first[0] / first[-1])),
    ]
    return TableBlock(("statement", "source", "holds", "by", "number"), rows, "claims")


def _claim(name: str, source: str, error: float, by: str) -> tuple[Cell, ...]:
    return name, source, error < EXACT, by, error


def _bound(name: str, used: float) -> tuple[Cell, ...]:
    return name, OURS, used <= 1, "largest share of the bound", used


def _order(name: str, ratio: float) -> tuple[Cell, ...]:
    return name, READ, ratio > 1, "KL over DPO's, lowest / highest weight", ratio


def tables(study: Study) -> tuple[TableBlock, ...]:
    """The claims and what they rest on."""
    policies = tuple(
        (
            *(row.reads.value, row.delta, row.residual, row.gradient, row.spread, row.error_best, row.gain),
            *(row.tv_best_h, row.bound_a, row.tv_h_dpo, row.bound_b),
        )
        for row in study.policies
    )
    lemmas = tuple(
        (
            *(row.reads.value, row.delta, row.pairs, row.identity),
            *(row.lowest, row.highest, row.outside, row.negative, row.used),
        )
        for row in study.lemmas
    )
    names = ("weights read", "delta", "residual h", "gradient pi*", "spread", "reward error pi*", "J(pi*)-J(h)")
    path = study.freedom
    steps = [path.steps.index(step) for step in path.steps if step in (1, 20, 200, path.steps[-1])]
    moves = tuple((str(path.steps[i]), *path.ratios[i].tolist()) for i in steps)
    return (
        claims(study),
        TableBlock((*names, "TV(pi*,h)", "bound (a)", "TV(h,DPO)", "bound (b)"), policies, "three policies"),
        TableBlock(
            ("weights read", "delta", "pairs", "lemma 1 error", "KL_w/KL min", "max", "outside", "negative", "used"),
            lemmas,
            "lemmas",
        ),
        TableBlock(
            ("weights", "residual min", "residual max", "TV of two starts"),
            tuple((row.weights, row.lowest, row.highest, row.starts) for row in study.existence),
            "does h exist",
        ),
        TableBlock(
            ("delta", "log Z", "error", "TV to h"),
            tuple((row.delta, row.log_mass, row.error, row.distance) for row in study.note),
            "normalised weighted likelihood of h",
        ),
        TableBlock(
            ("steps", *(f"w = {weight:.1f}" for weight in path.weights)),
            (*moves, ("optimum", *path.limit.tolist())),
            "KL per token over DPO's, by gradient steps",
        ),
    )


def report_text(study: Study) -> str:
    """All tables as plain text."""
    return "\n\n".join(table_text(one.columns, one.rows, title=one.caption) for one in tables(study))


def report_html(study: Study) -> str:
    """All tables as HTML."""
    return "\n".join(table_html(one.columns, one.rows, caption=one.caption) for one in tables(study))
