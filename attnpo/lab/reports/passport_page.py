"""The judge's passport as sections: the verdict first, for the terminal, and for one page with all numbers."""

import math
from collections.abc import Iterator, Mapping

from attnpo.display.page import Banner, KeyValues, Paragraph, Preformatted, Section, TableBlock
from attnpo.display.tables import DEFAULT_DIGITS, Cell, format_cell
from attnpo.judge.label_mass import in_words
from attnpo.lab.analysis.passport import RULE, Estimate, Worth
from attnpo.lab.reports.passport_record import LayerLook, Passport
from attnpo.system.files import in_bytes
from attnpo.system.machine import versions

COLUMNS = ("", "value", "95 % interval", "of")


def sections(found: Passport, *, short: bool = False) -> list[Section]:
    """Returns the passport for a page, or ``short`` for a terminal of 80 columns."""
    shown = [_verdict(found, short), _verdicts(found), _layers(found, short), _cost(found)]
    if not short:
        shown.insert(2, _calibration(found))
        shown += [
            Section(f"What became of {found.rows} rows before judging", [_counts(found.data)]),
            Section("What was cut, left out or noticed in the sample", [_counts(found.counts)]),
        ]
    return shown


def about(configuration: str) -> Section:
    """Returns what the passport was made with; ``configuration``: all settings as YAML."""
    return Section("Versions and configuration", [KeyValues(versions()), Preformatted(configuration)])


def _verdict(found: Passport, short: bool) -> Section:
    judgement = found.judgement
    blocks: list[Banner | Paragraph] = [
        Banner(judgement.worth.value.capitalize(), judgement.worth is Worth.READING),
        *(Paragraph(f"{'why' if short else 'Why'}: {reason}") for reason in judgement.reasons),
        *(Paragraph(f"{'next' if short else 'Next'}: {advice}") for advice in judgement.advice),
    ]
    if not short:
        blocks.append(Paragraph(f"The rule. {RULE[0].upper()}{RULE[1:]}."))
    return Section("Is the judge worth reading?", blocks)


# ------------------------------------------------------------------------------------------------ verdicts


def _verdicts(found: Passport) -> Section:
    told, accuracy = found.calibration, found.accuracy
    rows: list[list[Cell]] = [
        _row("right, both orders averaged", accuracy.averaged, "pairs"),
        _row("right, chosen answer first", accuracy.chosen_first, "pairs"),
        _row("right, chosen answer second", accuracy.chosen_second, "pairs"),
        _row("orders pick the same answer", accuracy.agree, "pairs"),
        _row("picks the first answer", accuracy.first_picked, "pairs"),
        _row("log-odds of the first answer", accuracy.pull, "pairs"),
        _row("verdict is no label", found.no_label, "pairs"),
        _row("probability of both labels", found.label_mass, "pairs"),
        ["the same, lowest tenth below", found.label_mass_low, "", f"{found.label_mass.count} pairs"],
        ["calibration error (ECE)", told.error, "", f"perfect: {told.ideal:.3f}"],
        ["confidence minus accuracy", told.excess, "", f"{accuracy.averaged.count} pairs"],
    ]
    if found.truth is not None:
        rows += [
            _row("labels that are truly wrong", found.truth.wrong_labels, "pairs"),
            _row("right by the truth, averaged", found.truth.accuracy, "pairs"),
        ]
    texts = Paragraph(f"Written at the verdict position: {in_words(found.written, 2 * found.label_mass.count)}.")
    return Section("Verdicts against the labels", [TableBlock(COLUMNS, rows), texts])


def _row(name: str, value: Estimate, unit: str) -> list[Cell]:
    return [name, value.value, interval(value), f"{value.count} {unit}"]


def interval(value: Estimate, digits: int = DEFAULT_DIGITS) -> str:
    """Returns the interval in words, empty where there is none."""
    return "" if math.isnan(value.low) else f"{format_cell(value.low, digits)} to {format_cell(value.high, digits)}"


def _calibration(found: Passport) -> Section:
    told = found.calibration
    rows: list[list[Cell]] = [
        [f"{one.low:.2f} to {one.high:.2f}", one.accuracy.count, one.confidence, one.accuracy.value,
         interval(one.accuracy)]
        for one in told.bins
    ]  # fmt: skip
    return Section(
        "Calibration",
        [
            Paragraph(
                "Pairs by how sure the averaged verdict is (of the two labels alone), against the share that is right. "
                f"Expected calibration error {told.error:.3f}; a perfectly calibrated judge of the same confidences "
                f"shows {told.ideal:.3f} on so many pairs by chance."
            ),
            TableBlock(("confidence", "pairs", "mean confidence", "right", "95 % interval"), rows),
        ],
    )


# ------------------------------------------------------------------------------------------------ layers


def _layers(found: Passport, short: bool) -> Section:
    removed = found.full is not None
    rows = [dict(_layer_cells(look, found, short)) for look in found.layers]
    notes = [
        f"answers: attention of the verdict position on both answers, which have {100 * found.answer_tokens:.0f} % "
        "of the prompt's tokens; effective: effective number of weights over the number of tokens"
    ]
    if removed:
        notes.append(
            f"fall: nats that the verdict's log-odds ({found.full:.3f}) fall without the top-weighted tokens, beside "
            "random ones of the same places; gain: the difference, with the interval that holds for all layers together"
        )
    if found.truth is not None:
        notes.append(f"true: share of the weights on what decides; equal weights have {found.truth.equal:.3f}")
    lost = [Paragraph(f"WARNING: {look.lost}", warning=True) for look in found.layers if look.lost is not None]
    return Section("Layers", [TableBlock(list(rows[0]), rows), *map(Paragraph, notes), *lost])


def _layer_cells(look: LayerLook, found: Passport, short: bool) -> Iterator[tuple[str, Cell]]:
    yield "layer", look.layer
    yield "answers", look.mass.value
    if not short:
        yield "95 % interval", interval(look.mass)
        yield "on the first", look.first
        yield "on the second", look.second
        yield "effective number", look.effective
        yield "kept chosen", look.kept_mass_chosen
        yield "kept rejected", look.kept_mass_rejected
    yield "effective", look.effective_share
    if look.gain is not None:
        yield "fall", look.fall
        yield "random", look.random
        yield "gain", look.gain.value
        yield "its interval", interval(look.gain, 2 if short else DEFAULT_DIGITS)
    if found.truth is not None:
        yield "true", look.truth


# ------------------------------------------------------------------------------------------------ cost


def _cost(found: Passport) -> Section:
    cost = found.cost
    return Section(
        f"Judge pass over all {cost.pairs} pairs that fit ({found.rows} rows), from {cost.measured} prompts",
        [
            KeyValues(
                {
                    "prompts (two a pair)": cost.prompts,
                    "prompt tokens": cost.tokens,
                    "seconds": f"{cost.seconds:.1f} on {cost.device}, and {cost.loading:.1f} to load the judge",
                    "in the store": in_bytes(cost.store),
                    "coverage of the training tokens": found.coverage,
                    "coverage of the judge's tokens": found.source_coverage,
                }
            ),
            *(
                [Paragraph(f"the passport itself read {cost.removals} more prompts, with tokens removed")]
                if cost.removals
                else []
            ),
        ],
    )


def _counts(counts: Mapping[str, int]) -> KeyValues | Paragraph:
    return KeyValues(dict(counts)) if counts else Paragraph("Nothing was dropped or cut.")
