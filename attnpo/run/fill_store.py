"""``attnpo.weigh``: fills the store with weights and reference log-probabilities ahead of training."""

import logging

from attnpo.data.prepare import prepare_examples
from attnpo.models.scored import ScoredLM
from attnpo.run.context import make_context
from attnpo.run.input_summary import log_captured
from attnpo.run.inputs import encode, read_pairs
from attnpo.run.lost_weights import log_arrivals
from attnpo.run.memory_check import log_memory
from attnpo.run.models import fill_reference, load_start
from attnpo.run.run_config import RunConfig
from attnpo.run.weighing import weigh
from attnpo.system.processes import process
from attnpo.weights.sources.uniform import Uniform

log = logging.getLogger(__name__)


def fill_store(cfg: RunConfig) -> None:
    """Puts this process's share of captured weights and reference log-probabilities into the store."""
    context = make_context(cfg)
    log_memory(context, training=False)
    cfg = context.cfg
    encoded = encode(context, read_pairs(context))
    for split, found in encoded.items():
        for line in found.tally.lines():
            log.warning("%s: %s", split, line)
    shard = process()
    if cfg.weights.requires:
        context = context.cfg.auto_layer.settle(context, encoded)
        weighed = weigh(context, encoded, shard=shard)
        log_captured(weighed)
        log_arrivals(context, weighed, encoded["train"])
    else:
        log.info("%s needs no judge: no weights to store", type(cfg.weights).__name__)
    if cfg.reference != "cached":
        return
    # Reference log-probs depend on training ids alone: any weights give the same ones.
    sets = {split: prepare_examples(found, Uniform(), {}, cfg.align) for split, found in encoded.items()}
    fill_reference(context, sets, ScoredLM(load_start(context), chunk=context.model.chunk), shard)
