"""``python -m attnpo.weigh``: stores token weights and, with ``reference=cached``, the reference's log-probabilities.

Any number of processes may fill one store: under torchrun or SLURM each process handles its share of the pairs.
"""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from attnpo.cli.progress import import_phase
from attnpo.cli.terminal import install_signal_handlers

if TYPE_CHECKING:
    from attnpo.lab.studies.config import WeighConfig
    from attnpo.run.run_config import RunConfig

log = logging.getLogger("attnpo.weigh")  # __main__ where it is the command

DESCRIPTION = "Store judge weights and, with reference=cached, the reference's log-probabilities; resumable."
EXAMPLES = """\
python -m attnpo.weigh setting=real_smoke model.path=MODEL data.path=PAIRS export=OUT.parquet
torchrun --nproc-per-node 2 -m attnpo.weigh setting=llama3_8b_base_sft hardware=2x80gb"""


def main(cfg: "WeighConfig") -> int:
    """Fills the store and, if requested, exports weights. Logs how many pairs were found and computed; returns 0."""
    from attnpo.run.messages import log_opening_lines

    log_opening_lines("weigh", cfg, None)
    with import_phase("loading transformers"):
        from attnpo.data.prepared_rows import prune_rows
        from attnpo.run.folders import store_root
        from attnpo.run.weight_export import check_export, write_weights

    if cfg.prune is not None:
        prune_rows(store_root(cfg.store), cfg.prune)
        return 0
    if cfg.export is not None:
        check_export(cfg.weights, Path(cfg.export))
        cfg.check_output_paths("export", Path(cfg.export).expanduser())
    fill_store(cfg)
    if cfg.export is not None:
        write_weights(cfg, Path(cfg.export))
    return 0


def fill_store(cfg: "RunConfig") -> None:
    """Stores this process's share of the captured weights and reference log-probabilities."""
    from attnpo.data.prepare import prepare_examples
    from attnpo.data.prepared import read_pairs
    from attnpo.models.scored import ScoredLM
    from attnpo.run.input_summary import log_coverage_by_layer, log_weight_summary
    from attnpo.run.inputs import encode_splits
    from attnpo.run.memory import log_judge_memory, require_device
    from attnpo.run.models import fill_reference_table, load_base_model, reference_table
    from attnpo.run.resolve import resolve
    from attnpo.system.processes import rank_and_world_size
    from attnpo.weights.sources.uniform import Uniform

    cfg, base, readers, _ = resolve(cfg)
    require_device(cfg.trainer.accelerator)
    if "judge" in cfg.weights.requires:
        log_judge_memory(readers.make_judge(), base.device)
    encoded = encode_splits(read_pairs(cfg.data, cfg.weights, base.store), base, cfg.lengths).encoded
    for split, found in encoded.items():
        for line in found.tally.format_lines():
            log.warning("%s: %s", split, line)
    shard = rank_and_world_size()
    if cfg.weights.requires:
        source, _ = cfg.auto_layer.resolve_layer(cfg.weights, readers, encoded["train"])
        weighed = readers.weigh(source, encoded, shard=shard)
        log_weight_summary(weighed)
        log_coverage_by_layer(readers, weighed, encoded["train"], cfg.align)
    else:
        log.info("%s needs no judge, so there are no weights to store", type(cfg.weights).__name__)
    if cfg.reference != "cached":
        return
    # Reference log-probabilities depend only on training ids, so any weights will do here.
    sets = {split: prepare_examples(found, Uniform(), {}, cfg.align) for split, found in encoded.items()}
    table, model = reference_table(base, cfg.lengths), ScoredLM(load_base_model(base), chunk=base.spec.chunk)
    fill_reference_table(base, table, sets, model, cfg.layout, readers.command, shard)


if __name__ == "__main__":
    install_signal_handlers()
    from attnpo.cli.entry import run_entry
    from attnpo.data.tables import check_validation as early

    sys.exit(
        run_entry(main, "weigh", None, DESCRIPTION, EXAMPLES, complete=lambda cfg: cfg.prepare is None, early=early)
    )
