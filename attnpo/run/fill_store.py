"""``attnpo.weigh``: fills the store with weights and reference log-probabilities ahead of training."""

import logging

from attnpo.data.prepare import prepare_examples
from attnpo.data.prepared import read_pairs
from attnpo.models.scored import ScoredLM
from attnpo.run.input_summary import log_captured
from attnpo.run.inputs import encode
from attnpo.run.lost_weights import log_arrivals
from attnpo.run.memory import log_judge, require_device
from attnpo.run.models import fill_reference, load_start, reference_table
from attnpo.run.resolve import resolve
from attnpo.run.run_config import RunConfig
from attnpo.system.processes import process
from attnpo.weights.sources.uniform import Uniform

log = logging.getLogger(__name__)


def fill_store(cfg: RunConfig) -> None:
    """Puts this process's share of captured weights and reference log-probabilities into the store."""
    cfg, base, readers, _ = resolve(cfg)
    require_device(cfg.trainer.accelerator)
    if "judge" in cfg.weights.requires:
        log_judge(readers.make_judge(), base.device)
    encoded = encode(read_pairs(cfg.data, cfg.weights, base.store), base, cfg.lengths).encoded
    for split, found in encoded.items():
        for line in found.tally.lines():
            log.warning("%s: %s", split, line)
    shard = process()
    if cfg.weights.requires:
        source, _ = cfg.auto_layer.settle(cfg.weights, readers, encoded["train"])
        weighed = readers.weigh(source, encoded, shard=shard)
        log_captured(weighed)
        log_arrivals(readers, weighed, encoded["train"], cfg.align)
    else:
        log.info("%s needs no judge: no weights to store", type(cfg.weights).__name__)
    if cfg.reference != "cached":
        return
    # Reference log-probs depend on training ids alone: any weights give the same ones.
    sets = {split: prepare_examples(found, Uniform(), {}, cfg.align) for split, found in encoded.items()}
    table, model = reference_table(base, cfg.lengths), ScoredLM(load_start(base), chunk=base.spec.chunk)
    fill_reference(base, table, sets, model, cfg.layout, readers.command, shard)
