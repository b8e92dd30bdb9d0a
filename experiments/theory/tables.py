"""Theory study's results as tables: every statement with its decisive number, and the supporting results."""

from typing import TYPE_CHECKING

from attnpo.display.page import TableBlock
from attnpo.display.tables import Cell, table_markdown
from experiments.theory.paper_bounds import PaperRow
from experiments.theory.paper_numbers import CONSTANTS, TABLE
from experiments.theory.statements import statements
from experiments.theory.study import Study

if TYPE_CHECKING:
    import pandas


def statement_table(study: Study) -> TableBlock:
    """Builds the table of statements with verdicts and decisive numbers."""
    rows = [(one.section, one.name, one.source, one.verdict.value, one.by, one.number) for one in statements(study)]
    return TableBlock(("section", "statement", "source", "verdict", "by", "number"), rows, "statements", naming=2)


def tables(study: Study) -> tuple[TableBlock, ...]:
    """Returns the statements and their supporting tables, the paper's first, then ours."""
    return (
        statement_table(study),
        *(_paper(study), _tightness(study), _published(), _properties(study), _note(study)),
        *(_policies(study), _lemmas(study), _existence(study), _freedom(study)),
    )


def frames(study: Study) -> "dict[str, pandas.DataFrame]":
    """Returns all tables as pandas frames, by caption."""
    import pandas

    return {str(one.caption): pandas.DataFrame(one.rows, columns=list(one.columns)) for one in tables(study)}


def report_markdown(study: Study) -> str:
    """Formats all tables as Markdown, each below its own heading."""
    return "\n\n".join(f"### {one.caption}\n{table_markdown(one)}" for one in tables(study))


# ------------------------------------------------------------------------------------------------ the paper's


def _paper(study: Study) -> TableBlock:
    heads = ("C pi*", "C DPO", "C h", "|J_w - J|", "bound 4", "KL(pi*,DPO)", "lemma 1", "KL(h,DPO)", "lemma 2")
    rows: list[tuple[Cell, ...]] = [
        (row.kind, row.delta, *row.constants.values(), *_pairs(row), row.theorem.actual, row.theorem.bound)
        for row in (*study.paper, study.ending)
    ]
    return TableBlock(
        ("weights read", "delta", *heads, "TV(pi*,h)", "theorem"),
        rows,
        "constants, the paper's quantities and bounds",
        naming=2,
    )


def _pairs(row: PaperRow) -> list[float]:
    return [number for one in (row.departure, row.lemma_1, row.lemma_2) for number in (one.actual, one.bound)]


def _tightness(study: Study) -> TableBlock:
    rows = [
        (
            *(one.varied, one.value, one.paper.constant, one.paper.lemma_1.looseness, one.paper.lemma_2.looseness),
            *(one.paper.theorem.looseness, one.paper.theorem.bound, one.ours / one.paper.theorem.actual, one.ours),
        )
        for one in study.tightness
    ]
    return TableBlock(
        ("varied", "value", "C", "lemma 1", "lemma 2", "theorem", "its bound", "our theorem (a)", "our bound"),
        rows,
        "tightness: bound over actual, weights that read the response",
        naming=2,
    )


def _published() -> TableBlock:
    names = [f"{what}, C {constant:g}" for what in ("KL bound", "TV bound") for constant in CONSTANTS]
    rows: list[tuple[Cell, ...]] = [
        (
            *(one.model, one.side, one.length, one.delta, one.effective, one.effective / one.length),
            *(one.kl_bound(constant) for constant in CONSTANTS),
            *(one.tv_bound(constant) for constant in CONSTANTS),
            one.largest_constant,
        )
        for one in TABLE
    ]
    heads = ("model", "side", "tokens", "delta", "effective tokens", "share")
    return TableBlock(
        (*heads, *names, "C where TV bound is 1"), rows, "bounds at the paper's table of weight statistics", naming=2
    )


def _properties(study: Study) -> TableBlock:
    rows: list[tuple[Cell, ...]] = []
    for row in study.properties:
        found = (row.moved_loss_step, row.moved_objective_step, row.moved_best, row.moved_heuristic)
        rows.append((row.kind, *(one.mean for one in (*found, row.carried_best, row.carried_heuristic))))
    heads = ("|d|, TwDPO step 1", "|d|, J_w step 1", "|d|, pi*", "|d|, h", "|w d|, pi*", "|w d|, h")
    return TableBlock(
        ("weights read", *heads), rows, "lowest over highest third of the weights, each over DPO's (P2, P3)"
    )


def _note(study: Study) -> TableBlock:
    rows = [
        (
            *(row.delta, row.log_mass, row.error, row.distance, row.pairs, row.reward),
            *(row.lemma_2, row.display, row.printed, row.intractable, row.constant),
        )
        for row in study.note
    ]
    heads = ("pairs", "reward", "lemma 2", "display", "as printed", "TV(pi*,h)", "range of C1")
    return TableBlock(("delta", "log Z", "error", "TV to h", *heads), rows, "normalised weighted likelihood of h")


# ------------------------------------------------------------------------------------------------ ours


def _policies(study: Study) -> TableBlock:
    rows = tuple(
        (
            *(row.reads.value, row.delta, row.residual, row.gradient, row.spread, row.error_best, row.gain),
            *(row.tv_best_h, row.bound_a, row.tv_h_dpo, row.bound_b),
        )
        for row in study.policies
    )
    names = ("weights read", "delta", "residual h", "gradient pi*", "spread", "reward error pi*", "J(pi*)-J(h)")
    return TableBlock(
        (*names, "TV(pi*,h)", "our bound (a)", "TV(h,DPO)", "our bound (b)"),
        rows,
        "three policies, our bounds",
        naming=2,
    )


def _lemmas(study: Study) -> TableBlock:
    rows = tuple(
        (
            *(row.reads.value, row.delta, row.pairs, row.identity),
            *(row.lowest, row.highest, row.outside, row.negative, row.used),
        )
        for row in study.lemmas
    )
    heads = ("our lemma 1 error", "KL_w/KL min", "max", "outside", "negative", "used")
    return TableBlock(("weights read", "delta", "pairs", *heads), rows, "our lemmas", naming=2)


def _existence(study: Study) -> TableBlock:
    rows = tuple((row.weights, row.lowest, row.highest, row.starts) for row in study.existence)
    return TableBlock(("weights", "residual min", "residual max", "TV of two starts"), rows, "does h exist")


def _freedom(study: Study) -> TableBlock:
    path = study.freedom
    steps = [path.steps.index(step) for step in path.steps if step in (1, 20, 200, path.steps[-1])]
    rows: tuple[tuple[Cell, ...], ...] = tuple((str(path.steps[i]), *path.ratios[i].tolist()) for i in steps)
    return TableBlock(
        ("steps", *(f"w = {weight:.1f}" for weight in path.weights)),
        (*rows, ("optimum", *path.limit.tolist())),
        "KL per token over DPO's, by gradient steps (P2)",
    )
