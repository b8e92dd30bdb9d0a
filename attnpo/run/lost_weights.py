"""Warnings of weights that are lost between a source's tokens and the training tokens, by layer and side."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from attnpo.data.prepare import CUT, CUT_IN_FRONT, EncodedSet, Tally, calibration_pairs, prepare_examples, sample_of
from attnpo.data.rules import AlignRules
from attnpo.data.weighing import Weighed
from attnpo.judge.base import WeightReader
from attnpo.judge.judge import RunJudge
from attnpo.judge.layers import HeadRow, Row
from attnpo.judge.settings import Assembly
from attnpo.run.readers import Readers
from attnpo.schema import SIDES
from attnpo.text.alignment import AlignMethod
from attnpo.weights.arrival import Arrival
from attnpo.weights.base import WeightSource
from attnpo.weights.capture import WEIGHTS, load_captured

log = logging.getLogger(__name__)

SAMPLE = 200
"""Pairs that stored layers are measured on, so that 32 layers take seconds whatever the store holds."""


def describe_loss(
    source: WeightSource,
    reader: WeightReader | None,
    align: AlignMethod,
    rows: Sequence[Row],
    arrived: Arrival,
    tally: Tally,
) -> str | None:
    """Returns what is lost, in which layer and side, and which options help; None where little is lost.

    ``rows`` are those that the weights of ``source`` come from, which ``reader`` read; ``tally`` says how many
    responses training cut. Weights that are made on the training tokens lose nothing but what is cut, which is logged
    by itself.
    """
    if source.tokens == "train" or not arrived.is_low:
        return None
    helps = []
    if isinstance(reader, RunJudge):
        same = reader.settings.assembly is Assembly.TEXT
        helps += ["judge.assembly=ids (for a judge with the model's tokenizer)"] * same
        helps.append("another wording (judge.template_file)")
    if align is AlignMethod.LEVENSHTEIN:
        helps.append("align.method=characters")
    cut = sum(tally.total(words.format(side)) for words in (CUT, CUT_IN_FRONT) for side in SIDES)
    cuts = f", with those on the {cut} pieces that lengths.max_length cut from responses" if cut else ""
    what = f". What can help: {', '.join(helps)}" if helps else ""
    return (
        f"weights of {name_rows(source, rows)}: {arrived.text()}: the weights of tokens that match no "
        f"training token are lost{cuts}{what}"
    )


def name_rows(source: WeightSource, rows: Sequence[Row]) -> str:
    """Returns where weights come from in words: the source, with its layers if it has any."""
    layers = sorted({row.layer if isinstance(row, HeadRow) else row for row in rows} - {0})
    name = type(source).__name__
    return f"{name}, layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}" if layers else name


def log_arrivals(readers: Readers, weighed: Weighed, encoded: EncodedSet, align: AlignRules) -> None:
    """Logs coverage and kept mass of each stored layer, measured on a sample of this process's pairs.

    Single heads, and the mean of several layers, are measured as the run reads them. Transforms, which are fitted on
    all pairs, are left out.
    """
    pairs = calibration_pairs([pair for pair in encoded.pairs if pair.pair_id in weighed.captured], SAMPLE)
    sample = sample_of(encoded, pairs)["train"]
    source, rows, captured = weighed.source, weighed.layers, weighed.captured
    reader = readers.make(source)
    stored = source.capture_layers(weighed.depth)
    sources = [source]
    if rows == (getattr(source, "layer", None),) and len(stored) > 1:
        sources = [replace(source, layer=layer) for layer in stored]  # type: ignore[type-var]
        table = readers.base.store.table(WEIGHTS, weighed.key)
        rows, captured = stored, load_captured(table, [pair.pair_id for pair in pairs], stored)
    for one in sources if pairs else ():
        made = prepare_examples(sample, one, captured, align, rows)
        if not made.examples:
            continue  # what dropped them all is counted with the data
        arrived, read = Arrival.of(made.examples), one.rows_read()
        log.info("weights of %s: %s (%d pairs)", name_rows(one, read), arrived.text(), len(made.examples))
        lost = describe_loss(one, reader, align.method, read, arrived, made.tally)
        if lost is not None:
            log.warning("%s", lost)
