"""Model, data and judge of a run: built or found, described, and checked before any data is read."""

import logging
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from transformers.utils import logging as quiet

from attnpo.cli.progress import phase
from attnpo.cli.terminal import command_text
from attnpo.config.compose import MISSING
from attnpo.data.base import PairReader
from attnpo.judge.judge import RunJudge
from attnpo.judge.settings import Judge
from attnpo.models.compiled import require_backend
from attnpo.models.described import on_meta, require_exact
from attnpo.models.kept_digests import keep_digests
from attnpo.models.loading import attention_of, load_chat, load_config, model_depth, text_config
from attnpo.models.lora import reach
from attnpo.models.memory import Shape, count_parameters
from attnpo.models.spec import AUTO, ModelSpec
from attnpo.run.base import BaseModel
from attnpo.run.combinations import require_reader, wants_auto
from attnpo.run.components import JudgePreparer, PreparedJudge, Preparer
from attnpo.run.folders import store_root
from attnpo.run.messages import log_once
from attnpo.run.readers import Readers
from attnpo.run.run_config import RunConfig
from attnpo.schema import UserError
from attnpo.system.machine import device_of
from attnpo.system.store import Store
from attnpo.weights.base import WeightSource

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=RunConfig)


class Resolved(NamedTuple, Generic[Config]):
    """A configuration whose paths are known, and what a run makes of it first: unpacked by each command's body.

    ``report``: what ``prepare`` says of model, data and judge where it built them.
    """

    cfg: Config
    base: BaseModel
    readers: Readers
    report: dict[str, object]


@phase("building or finding model and data")
def settle(cfg: Config) -> tuple[Config, dict[str, object]]:
    """Returns the config with the paths of model, data and judge known, and what ``prepare`` reports (empty without
    one).

    A path given by hand is kept. UserError when a path is still missing.
    """
    report: dict[str, object] = {}
    root = store_root(cfg.store) / "prepared"
    if cfg.prepare is not None:
        prepared = cfg.prepare.prepare(root)
        report = {**prepared.report, "reused": prepared.reused}
        for key, path in (("model.path", prepared.model_path), ("data.path", prepared.data_path)):
            if key in open_paths(cfg.model, cfg.data):
                cfg = cfg.with_value(key, str(path))
    lacking = open_paths(cfg.model, cfg.data)
    if lacking:
        raise UserError(f"{' and '.join(lacking)} must be given, as in {lacking[0]}=FOLDER_OR_HUB_NAME")
    made = make_judge(cfg.judge, cfg.weights, cfg.prepare, root)
    if made is None:
        return cfg, report
    cfg = cfg.with_value("other_judge.path", str(made.path)).with_value("judge.path", str(made.path))
    return cfg, {**report, "second": report_of(made)}


def open_paths(model: ModelSpec, data: PairReader) -> list[str]:
    """Returns the keys of the paths of model and data that are still to be given."""
    mixed = getattr(data, "mix", None)
    paths = {"model.path": model.path, "data.path": None if mixed else getattr(data, "path", None)}
    return [key for key, path in paths.items() if path == MISSING]


def make_judge(judge: Judge, source: WeightSource, prepare: Preparer | None, root: Path) -> PreparedJudge | None:
    """Returns the other model that judges, built below ``root`` if it is missing; None where none is to be built.

    That is for weights without a judge, for the own model and for a path that is given. UserError when another model is
    meant, none is named and ``prepare`` has none.
    """
    if not judge.other or judge.path is not None or "judge" not in source.requires:
        return None
    if not isinstance(prepare, JudgePreparer):
        raise UserError(
            "judge=other reads another model, and other_judge.path is null: set other_judge.path=FOLDER_OR_HUB_NAME "
            "(setting=testbed builds one of its own)"
        )
    try:
        return prepare.prepare_judge(root)
    except UserError as error:
        raise UserError(f"judge=other, and other_judge.path is null: {error}, or set other_judge.path") from error


def report_of(judge: PreparedJudge) -> dict[str, object]:
    """Returns what ``prepare`` says of a judge that it built or found."""
    return {**judge.report, "reused": judge.reused}


def resolve(cfg: Config) -> Resolved[Config]:
    """Returns the settled config with the described model and what its weights are read with.

    Logs what the model is. Raises UserError for a judge, a layer, a verbalizer or a scorer that could not be read, and
    for weights that nothing would read, before any data is.
    """
    # Model folders load and save in moments; their bars bury the log.
    quiet.disable_progress_bar()  # type: ignore[no-untyped-call]
    keep_digests(store_root(cfg.store) / "digests", full=cfg.digests == "full")
    cfg, report = settle(cfg)
    with phase("reading the model's configuration and tokenizer"):
        if cfg.model.compile not in (None, AUTO):
            require_backend(cfg.model.compile)
        model, chat = load_chat(cfg.model)
        log_model(model)
        require_exact(text_config(model.path, model.revision), model.path, "lengths.max_length", cfg.lengths.max_length)
        device, store = device_of(cfg.trainer.accelerator), Store(store_root(cfg.store))
        base = BaseModel(model, chat, device, cfg.trainer.precision, store)
        command = command_text("weigh", *cfg.composed.arguments())
        length_from = getattr(cfg.objective, "length_from", None)
        readers = Readers(base, cfg.judge, cfg.verbalizer, cfg.lengths, cfg.align.method, length_from, command)
        require_reader(cfg.weights, cfg.objective)
        judged = check_readers(readers, cfg.weights)
        log_once([f"chat template: training has {chat.chosen.origin}{judged}"])
    return Resolved(cfg, base, readers, report)


def check_readers(readers: Readers, source: WeightSource) -> str:
    """Returns how a judge's prompt is framed, "" without a judge.

    UserError for a reader or a layer that is not there.
    """
    judge = readers.make(source)
    if "reward" in source.requires and judge is not None:
        source.resolve(judge.num_layers)
    if not isinstance(judge, RunJudge):
        return ""
    depth = judge.num_layers
    if len(depth.attending) < depth:
        layers = ", ".join(map(str, depth.attending))
        log_once([f"judge: {judge.path} has attention in {len(depth.attending)} of {int(depth)} layers: {layers}"])
    if not wants_auto(source):
        source.resolve(depth)
    return f"; {judge.describe_frame()}"


def log_model(spec: ModelSpec) -> None:
    """Logs what a model's config says: class, parameters, layers. UserError when there is no such config."""
    layers = model_depth(spec.path, spec.revision)
    config = load_config(spec.path, spec.revision)
    parameters, adapters = count_parameters(config, spec.lora)
    name = (config.architectures or [type(config).__name__])[0]
    trained = f" ({adapters:,} more in adapters, which alone are trained)" if adapters else ""
    attention = attention_of(spec.path, spec.revision, spec.attn_implementation)
    instead = "" if attention == spec.attn_implementation else f", {attention} attention (its class has no other)"
    stored = str(config.dtype or spec.dtype).removeprefix("torch.")
    held = spec.dtype if stored == spec.dtype else f"{spec.dtype} (its folder: {stored})"
    lines = [f"model: {spec.path}, {name}, {parameters:,} parameters{trained}, {held}, {layers} layers{instead}"]
    if spec.lora is not None:
        lines.append(reach(on_meta(config), spec.lora))
    if spec.quantize is not None:
        packed = Shape.of(config).linear / parameters
        lines.append(f"model.quantize: {packed:.0%} of the parameters, the blocks' linear modules, are kept in 4 bits")
    log_once(lines)
