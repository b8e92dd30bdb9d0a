"""Exports a run's token weights as a data set for other trainers: token ids and weights of all pairs, in one file.

``FILE.meta.json`` next to it, and the schema metadata of a Parquet file (key "attnpo", JSON), describe how the weights
were computed. docs/python_api.md explains the columns.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from attnpo.config.compose import load
from attnpo.data.collate import TrainingExample
from attnpo.data.weighing import SPLITS
from attnpo.models.spec import ModelSpec
from attnpo.run.folders import load_saved_config
from attnpo.run.inputs import Inputs, read_inputs
from attnpo.run.resolve import resolve
from attnpo.run.run_config import RunConfig
from attnpo.schema import SIDES, PreferencePair, UserError, check_choice, digest
from attnpo.system.credentials import redact
from attnpo.system.files import check_is_marked_file, write_marked_file
from attnpo.system.processes import world_size
from attnpo.system.version import VERSION
from attnpo.text.chat import ChatFormat
from attnpo.weights.base import OnlineSource, WeightSource

log = logging.getLogger(__name__)

FORMAT = 1
PARQUET, JSONL = ".parquet", ".jsonl"
ROWS = 1000  # pairs per row group
META = "attnpo"
MAKER = "attnpo.weigh"
SHARES = ("coverage", "source_coverage", "kept_mass")

_IDS, _WEIGHTS = pa.list_(pa.int32()), pa.list_(pa.float32())
SCHEMA = pa.schema(
    [
        ("pair_id", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        *((side, pa.string()) for side in SIDES),
        ("prompt_ids", _IDS),
        *((f"{side}_ids", _IDS) for side in SIDES),
        *((f"{side}_weights", _WEIGHTS) for side in SIDES),
        *((f"{side}_scale", pa.float32()) for side in SIDES),
        *((f"{side}_{share}", pa.float32()) for share in SHARES for side in SIDES),
        ("pair_weight", pa.float32()),
        ("source", pa.string()),
        ("layer", pa.int32()),
    ]
)


def export_weights(
    path: str | Path, overrides: Sequence[str] = (), *, run: str | Path | None = None, split: str = "train"
) -> Path:
    """Writes the token weights of a config, or of a finished run, to ``path`` (.parquet or .jsonl); returns the path.

    Weights come from the store; missing ones are computed first. Replaces an earlier export, but no other file.

    Args:
        path: output file; its folder is created.
        overrides: as on the command line of ``attnpo.weigh``: ``["setting=real_smoke", "model.path=MODEL", ...]``.
        run: folder of a run whose config is used instead of ``overrides``.
        split: "train" or "val".

    Raises:
        UserError: the suffix is unknown, ``path`` is another kind of file, weights are computed only during training,
            the responses of a pair keep different parts of the prompt (``lengths.keep=end``), or ``attnpo.weigh`` would
            fail.
    """
    if run is not None and overrides:
        raise UserError("export_weights: expected either overrides or run=FOLDER, got both: remove one of them")
    cfg = load("weigh", list(overrides)) if run is None else load_saved_config(Path(run), f"run={run}")
    return write_weights(cfg, Path(path), split)


def write_weights(cfg: RunConfig, path: Path, split: str = "train") -> Path:
    """Writes the token weights of a typed config; see ``export_weights``."""
    check_export(cfg.weights, path)
    cfg.check_output_paths("export", path.expanduser())
    check_choice("split", split, SPLITS)
    path = path.expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(
            f"export={path}: cannot create the folder for this file ({problem.strerror}); choose a different folder"
        ) from problem
    cfg, base, readers, _ = resolve(cfg)
    inputs = read_inputs(cfg, base, readers)
    rows, nodes = list(export_rows(inputs, split)), ("lengths", "align", "weights", "transforms")
    settings = {name: cfg.node(name) for name in nodes}
    meta = cast("dict[str, object]", redact(export_metadata(inputs, split, cfg.model, base.chat, settings)))
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    content = _to_parquet(rows, meta) if path.suffix == PARQUET else "".join(lines)
    write_marked_file(f"export={path}", path, content, MAKER, meta)
    log.info("wrote %d pairs with token weights to %s", len(rows), path)
    return path


def check_export(source: WeightSource, path: Path) -> None:
    """Raises UserError, before any model runs, for an unsuitable file, unsuitable weights or a multi-process job."""
    if path.suffix not in (PARQUET, JSONL) or path.is_dir():
        raise UserError(f"export={path}: expected a file with extension {PARQUET} or {JSONL}")
    if isinstance(source, OnlineSource):
        raise UserError(
            f"export={path}: {type(source).__name__} computes its weights in every training step, so there are none "
            "to export: use weights that are read before training, e.g. weights=attention"
        )
    if world_size() > 1:
        raise UserError(
            f"export={path}: only a single process can write the file, but this job has {world_size()}: fill the store "
            "first, then run the same command with export= in a single process"
        )
    check_is_marked_file(f"export={path}", path.expanduser(), MAKER)


def export_rows(inputs: Inputs, split: str) -> Iterator[dict[str, object]]:
    """Yields one row per training pair, in order. Raises UserError if a pair's prompts were truncated differently."""
    pairs = {pair.pair_id: pair for pair in inputs.pairs[split].pairs}
    source, layers = type(inputs.weighed.source).__name__, inputs.weighed.layers
    layer = layers[0] if len(layers) == 1 and isinstance(layers[0], int) and layers[0] > 0 else None
    for example in inputs.examples[split].examples:
        row = {**_make_row(pairs[example.pair_id], example), "source": source, "layer": layer}
        yield {name: row[name] for name in SCHEMA.names}


def _make_row(pair: PreferencePair, example: TrainingExample) -> dict[str, object]:
    if example.chosen.prompt_ids != example.rejected.prompt_ids:
        raise UserError(
            f"pair {pair.pair_id}: its two responses keep different parts of the prompt, but a row has only one: set "
            "lengths.keep=start, or lengths.overlong=drop to drop such pairs"
        )
    row: dict[str, object] = {
        "pair_id": pair.pair_id,
        "prompt": [dict(message) for message in pair.prompt],
        "prompt_ids": list(example.chosen.prompt_ids),
        "pair_weight": example.pair_weight,
    }
    for place, side in enumerate(SIDES):
        row[side] = pair.response(side)
        row[f"{side}_ids"] = list(example.sides[place].response_ids)
        row[f"{side}_weights"] = example.weights[place].float().tolist()
        row[f"{side}_scale"] = example.weight_scales[place]
        row |= {f"{side}_{share}": getattr(example, share)[place] for share in SHARES}
    return row


def export_metadata(
    inputs: Inputs, split: str, model: ModelSpec, chat: ChatFormat, settings: Mapping[str, object]
) -> dict[str, object]:
    """Returns a record of how the weights were computed (model, tokenizer, ``settings``), and the pair counts."""
    weighed, made = inputs.weighed, inputs.examples[split]
    return {
        "format": FORMAT,
        "attnpo": VERSION,
        "split": split,
        "pairs": len(made.examples),
        "dropped": made.dropped,
        "counts": made.tally.format_lines(),
        "model": model.path,
        "revision": model.revision,
        "tokenizer": chat.fingerprint(),
        **settings,
        "kind": weighed.source.kind.value,
        "layers": [list(row) if isinstance(row, tuple) else row for row in weighed.layers],
        "captured": digest(weighed.key)[:16],
    }


def _to_parquet(rows: Sequence[Mapping[str, object]], meta: Mapping[str, object]) -> bytes:
    table = pa.Table.from_pylist(list(rows), schema=SCHEMA.with_metadata({META: json.dumps(meta)}))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", row_group_size=ROWS)
    content: bytes = sink.getvalue().to_pybytes()
    return content
