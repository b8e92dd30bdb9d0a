"""Reports on a finished run: HTML page, W&B summary and model card data."""

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from transformers import PreTrainedTokenizerBase

from attnpo.cli.progress import phase
from attnpo.config.compose import Composition
from attnpo.config.fields import to_config
from attnpo.data.weighing import SPLITS
from attnpo.display.column_notes import column_notes
from attnpo.display.figures import drift_figure, training_curves
from attnpo.display.heatmap import heatmap_html
from attnpo.display.page import (
    Block,
    CodeBlock,
    Image,
    KeyValues,
    Paragraph,
    RawHtml,
    Section,
    SideBySide,
    TableBlock,
    report_page,
)
from attnpo.display.tables import Cell
from attnpo.models.loading import load_text_config, weights_fingerprint
from attnpo.models.spec import ModelSpec
from attnpo.run.folders import store_root
from attnpo.run.input_summary import describe_example
from attnpo.run.inputs import Inputs, make_heat_map_pairs
from attnpo.run.result import RunResult, TruthScores
from attnpo.run.run_config import RunConfig
from attnpo.system.credentials import mask_credentials
from attnpo.system.files import Json, flatten, parse_json, write_atomically
from attnpo.system.machine import package_versions
from attnpo.text.chat import ChatFormat
from attnpo.training.export import Exporter, rotary_warning
from attnpo.training.loggers import wandb_loggers
from attnpo.training.metrics_file import METRICS, read_metrics
from attnpo.training.settings import CallbackSettings
from attnpo.weights.arrival import COLUMNS as ARRIVED
from attnpo.weights.capture import LogpPair

log = logging.getLogger(__name__)


CURVES, DRIFT, REPORT, SAMPLES = "curves.png", "drift.png", "report.html", "generations.jsonl"


@phase("report and figures")
def write_run_report(
    inputs: Inputs,
    result: RunResult,
    chat: ChatFormat,
    settings: CallbackSettings,
    configuration: str,
    folder: Path,
    policy: Mapping[str, LogpPair] | None = None,
) -> None:
    """Writes ``curves.png`` and ``report.html`` of one run.

    ``configuration``: all settings as YAML. ``policy``: log-probabilities of the first pairs after training, by pair
    id.
    """
    training_curves(read_metrics(folder / METRICS), folder / CURVES, folder.name)
    found = (*result.warnings, chat.chosen.warning)
    warnings: list[Block] = [Paragraph(f"WARNING: {text}", warning=True) for text in found if text]
    blocks: list[Section] = [
        *([Section("Warning", warnings)] if warnings else []),
        Section("Training", [Image(folder / CURVES, "training and validation by optimiser step")]),
    ]
    if result.truth is not None:
        blocks.append(Section("True reward on held-out prompts", [true_reward_table(result.truth)]))
    if settings.samples and (samples := read_samples(folder)):
        answers = [
            SideBySide(row["prompt"], {"before (reference)": row["reference"], "after (policy)": row["policy"]})
            for row in samples
        ]
        blocks.append(Section("Answers before and after training", answers))
    if result.drift:
        blocks.append(drift_section(result, folder))
    blocks.append(inputs_section(result))
    if settings.heat_maps and (shown := make_heat_map_pairs(inputs, chat.tokenizer, settings.heat_maps, policy)):
        blocks.append(
            Section("Token weights of the first pairs", [Paragraph(HOVER), RawHtml(heatmap_html(shown, page=False))])
        )
    example = next(iter(inputs.examples["train"].examples), None)
    if example is not None:
        blocks.append(
            Section("First training example", [CodeBlock("\n".join(describe_example(example, chat.tokenizer)))])
        )
    blocks.append(
        Section(
            "Versions and configuration",
            [
                KeyValues(result.versions),
                CodeBlock(configuration, "full configuration"),
            ],
        )
    )
    write_atomically(folder / REPORT, report_page(folder.name, blocks))
    log.info("report: %s", folder / REPORT)


HOVER = (
    "Hover over a token for its weight relative to uniform, its id, its position and the known log-probabilities. "
    "These are the weights used in training: after all post-processing, on training tokens."
)


def read_samples(folder: Path) -> list[dict[str, str]]:
    """Reads the sampled responses of policy and reference, with prompts as text; returns [] if nothing was sampled."""
    path = folder / SAMPLES
    rows = [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    return [
        {**row, "prompt": "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in row["prompt"])} for row in rows
    ]


def true_reward_table(truth: Mapping[str, TruthScores]) -> TableBlock:
    """Returns the true-reward scores as a table with one row per prompt set."""
    names = list(truth["test"].numbers)
    heads = ["prompts", *("KL" if name == "kl" else readable_name(name) for name in names)]
    rows: list[list[Cell]] = [[split, *(scores.numbers[name] for name in names)] for split, scores in truth.items()]
    return TableBlock(heads, rows, notes=column_notes(heads))


def inputs_section(result: RunResult) -> Section:
    """Returns the inputs section: a table with one column per split, a table of lengths, and all other entries."""
    every = {
        part: {name: value for name, value in flatten(result.split(part), " ") if value != {}} for part in result.inputs
    }
    names = list(dict.fromkeys(name for split in SPLITS for name in every.get(split, {}) if name != "warning"))
    kinds = [name.removesuffix(f" {PLACES[0]}") for name in names if name.endswith(f" {PLACES[0]}")]
    inside = {f"{kind} {place}" for kind in kinds for place in PLACES}

    def make_row(name: str, *places: str) -> list[Cell]:
        found = (every.get(split, {}).get(f"{name} {place}".strip()) for split in SPLITS for place in places or ("",))
        return [readable_name(name.removeprefix("tokens ")), *map(_format_cell, found)]

    single = [make_row(name) for name in names if name not in inside]
    words = [SPLIT_WORDS[split] for split in SPLITS]
    rest = {
        f"{readable_name(part)}: {readable_name(name)}": _format_cell(value)
        for part in every
        if part not in SPLITS
        for name, value in every[part].items()
    }
    blocks: list[Block] = [TableBlock(["entry", *words], single)] if single else []
    if kinds:
        heads = ["length in tokens", *(f"{word} {place}" for word in words for place in PLACES)]
        blocks.append(TableBlock(heads, [make_row(kind, *PLACES) for kind in kinds]))
    return Section("Inputs", [*blocks, *([KeyValues(rest)] if rest else [])])


SPLIT_WORDS = {"train": "training", "val": "validation"}
PLACES = ("p50", "p90", "p99", "max")


def readable_name(name: str) -> str:
    """Returns the display form of a key for pages."""
    return name.replace("_", " ")


def _format_cell(value: object) -> Cell:
    """Converts a value to a table cell; joins a list of [string, count] into one string."""
    if isinstance(value, list):
        return ", ".join(f"{one[0]!r} ({one[1]})" if isinstance(one, list) else str(one) for one in value)
    return value if isinstance(value, str | float | int | None) else str(value)


PARTS = {"answers": "sampled answers", "pairs": "validation pairs"}
BY = {"classes": "by weight", "truth": "by the grammar"}
KL = {"tokens": "share of tokens", "kl": "share of KL", "kl_per_token": "KL per token"}


def drift_section(result: RunResult, folder: Path) -> Section:
    """Returns the section on policy drift: KL by token class, the other metrics and ``drift.png``.

    Also draws the figure.
    """
    every = dict(flat_numbers(result.drift))
    parts = {part: words for part, words in PARTS.items() if part in result.drift}
    paths = [name.split("/") for name in every]
    kinds = dict.fromkeys((path[1], path[2]) for path in paths if path[1:2] in (["classes"], ["truth"]))
    rows: list[list[Cell]] = [
        [
            f"{BY[group]}: {name.replace('_', ' ')}",
            *(every.get(f"{part}/{group}/{name}/{key}") for part in parts for key in KL),
        ]
        for group, name in kinds
    ]
    deciles, places = (
        {words: line for part, words in parts.items() if (line := dict(_entries_under(every, f"{part}/{by}/kl/")))}
        for by in ("deciles", "position")
    )
    totals = {f"KL per response, {words}": every.get(f"{part}/kl") for part, words in parts.items()}
    rest = {
        readable_name(name).replace("/", ": "): value
        for name, value in every.items()
        if name.partition("/")[0] not in parts
    }
    return Section(
        "Where the policy moved",
        [
            TableBlock(["class", *(f"{words}: {key}" for words in parts.values() for key in KL.values())], rows),
            Image(drift_figure(deciles, places, folder / DRIFT), "KL to the base per token"),
            KeyValues({**totals, **rest}),
        ],
    )


def _entries_under(every: Mapping[str, float | int], prefix: str) -> Iterator[tuple[str, float | int]]:
    """Yields (name, value) for each entry whose name starts with ``prefix``, with the prefix removed."""
    return ((name.removeprefix(prefix), value) for name, value in every.items() if name.startswith(prefix))


TRAINER_KEYS = ("max_epochs", "max_steps", "gradient_clip_val", "precision", "strategy")
WEIGHT_NUMBERS = ("coverage", *ARRIVED, "effective_share", "unmatched_share")
# Overrides that change no number; they contain folders and names from the run's machine.
PRIVATE = ("name", "output", "store", "resume", "logger")
OWN_WORDS = ("path", "revision", "chat_template")  # shown elsewhere in the card or the exported folder
DROPPED = "dropped: "  # prefix of the events of dropped pairs in a tally
BOS_WRITTEN = (
    "training puts the tokenizer's BOS in front of a prompt but the base's chat template does not, so the exported "
    "chat template adds it"
)
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@phase("sending results to the loggers")
def log_run_to_wandb(
    loggers: Sequence[Logger],
    inputs: Inputs,
    result: RunResult,
    tokenizer: PreTrainedTokenizerBase,
    settings: CallbackSettings,
    folder: Path,
) -> None:
    """Sends a run's metrics (``result/PATH``), inputs, samples, curves and heat maps to W&B, if W&B is in use."""
    for tracker in wandb_loggers(loggers):
        import wandb

        tracker.experiment.summary.update({f"result/{name}": value for name, value in flat_numbers(result.to_json())})
        tables = {"account": inputs_table(result.inputs)}
        if settings.samples and (samples := read_samples(folder)):
            tables["samples"] = list(samples[0]), [list(row.values()) for row in samples]
        media: dict[str, Any] = {name: make_wandb_table(*table) for name, table in tables.items()}
        if settings.report and (folder / CURVES).is_file():
            media["curves"] = wandb.Image(str(folder / CURVES))
        if settings.heat_maps and (shown := make_heat_map_pairs(inputs, tokenizer, settings.heat_maps)):
            page = heatmap_html(shown, title=folder.name)
            media["weights/heat_maps"] = wandb.Html(page, inject=False)
        tracker.log_metrics(media, step=result.steps)


def inputs_table(inputs: Mapping[str, Json]) -> tuple[list[str], list[list[object]]]:
    """Returns the columns and rows of a table of all input statistics of a run, with one column per split."""
    every = dict(flat_numbers(inputs))
    per_split = {split: dict(_entries_under(every, f"{split}/")) for split in SPLITS}
    names = list(dict.fromkeys(name for values in per_split.values() for name in values))
    return ["entry", *SPLITS], [[name, *(per_split[split].get(name) for split in SPLITS)] for name in names]


def make_wandb_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> object:
    """Returns a W&B table, which may mix numbers and strings in a column."""
    import wandb

    return wandb.Table(columns=list(columns), data=[*rows], allow_mixed_types=True)


def flat_numbers(node: Mapping[str, object]) -> Iterator[tuple[str, float | int]]:
    """Yields (path, value) for each finite number in nested mappings; skips lists, strings and booleans."""
    for path, value in flatten(node, "/"):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield path, value


# ------------------------------------------------------------------------------------------------ card


def make_exporter(
    model: ModelSpec, chat: ChatFormat, dtype: str | None, facts: Mapping[str, object] | None
) -> Exporter:
    """Returns a run's exporter with its tokenizer, chat template, end-of-turn token ids and model card data.

    Logs notes for users of the exported folder. Without ``facts``, logs nothing and writes no card.
    """
    ends, template = tuple(sorted(chat.end_ids)), chat.inference_template()
    if facts is None:
        return Exporter(chat.tokenizer, ends, dtype, chat_template=template)
    chosen = chat.chosen
    log.info("checkpoints: the exported chat template is the one used in training, %s", chosen.origin)
    notes = [] if chosen.warning is None else [chosen.warning]
    if template != chat.chat_template:
        notes.append(BOS_WRITTEN)
        log.info("checkpoints: %s", BOS_WRITTEN)
    options = {"chat_template_kwargs": dict(model.chat_template_kwargs or {}), "fold_system": model.fold_system}
    if any(options.values()):
        told = ", ".join(f"model.{key}={json.dumps(value)}" for key, value in options.items() if value)
        notes.append(f"the exported chat template applies the training settings: {told}")
        log.info("checkpoints: %s", notes[-1])
    older = rotary_warning(load_text_config(model.path, model.revision))
    if older is not None:
        notes.append(older)
        log.warning("checkpoints: %s", older)
    return Exporter(chat.tokenizer, ends, dtype, facts, chat_template=template, notes=tuple(notes))


def card_facts(cfg: RunConfig, model: ModelSpec, inputs: Inputs, statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a run's model card data (``model_card.Facts``) without metrics. Hashes the base model."""
    prepared, source = store_root(cfg.store) / "prepared", inputs.weighed.source
    data, mix, judge = cfg.node("data"), getattr(cfg.data, "mix", None), cfg.node("judge")
    path = judge.pop("path")
    read = "the base model itself" if path is None else _describe_source(str(path), prepared)["name"]
    return {
        "reward": model.reward,
        "base": {
            **_describe_source(model.path, prepared),
            "revision": model.revision,
            "fingerprint": weights_fingerprint(model.path, model.revision),
        },
        "data": {
            **_describe_source("mixture of " + ", ".join(mix) if mix else str(data["path"]), prepared),
            "revision": data["revision"],
            "subset": data["subset"],
            "splits": {split: _split_facts(inputs, split, statistics[split]) for split in SPLITS},
        },
        "method": {
            "objective": {"name": type(cfg.objective).__name__, "settings": flat_settings(cfg.node("objective"))},
            "weights": {"name": type(source).__name__, "settings": flat_settings(to_config(source))},
            "judge": {"name": read, "settings": flat_settings(judge)} if "judge" in source.requires else None,
            "verdicts": statistics.get("judge"),
        },
        "statistics": {split: {name: statistics[split].get(name) for name in WEIGHT_NUMBERS} for split in SPLITS},
        "hyperparameters": {
            **flat_settings({node: cfg.node(node) for node in ("optimizer", "batch", "lengths", "align")}),
            **{f"trainer.{name}": getattr(cfg.trainer, name) for name in TRAINER_KEYS},
            **flat_settings({"model": {k: v for k, v in cfg.node("model").items() if k not in OWN_WORDS}}),
            "reference": cfg.reference,
            "seed": cfg.seed,
        },
        "versions": package_versions(),
        "command": fit_command(cfg.composed),
        "overlap": None if inputs.overlap is None else inputs.overlap.warning(),
    }


def fit_command(composed: Composition) -> list[str]:
    """Returns the command that reproduces a run's config, omitting overrides that only name folders."""
    kept = [
        mask_credentials(override)
        for override in composed.overrides
        if override.lstrip("+~").partition("=")[0].partition(".")[0] not in PRIVATE
    ]
    return ["python", "-m", "attnpo.fit", *replace(composed, overrides=tuple(kept)).arguments()]


def flat_settings(node: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings of a component's config node, with dotted names for nested ones."""
    return {key: value for key, value in flatten(node) if value != {} and key.rpartition(".")[2] != "_target_"}


def _split_facts(inputs: Inputs, split: str, statistics: Mapping[str, object]) -> dict[str, object]:
    pairs, events = inputs.pairs[split], inputs.examples[split].tally.counts
    lost = {name.removeprefix(DROPPED): count for name, count in events.items() if name.startswith(DROPPED)}
    return {
        "read": statistics["read"],
        "kept": statistics["pairs"],
        "dropped": {**pairs.counts, **lost},
        "noted": {**pairs.notes, **{name: n for name, n in events.items() if not name.startswith(DROPPED)}},
    }


def _describe_source(path: str, prepared: Path) -> dict[str, Any]:
    """Returns name, path and Hub id of a model or data set for the card; omits the path if ``prepare`` built it."""
    if Path(path).is_relative_to(prepared):
        return {"name": "a testbed base", "path": "built from scratch by `prepare`", "hub": None}
    local = Path(path).expanduser().exists()
    hub = None if local or HUB_ID.fullmatch(path) is None else path
    return {"name": path.rstrip("/").rpartition("/")[2] or path, "path": path, "hub": hub}
