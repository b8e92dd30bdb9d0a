"""What the points of one world and seed stand on: base, pairs, one judge pass, and what is measured beside them."""

import inspect
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from attnpo.config.named_files import below, files_of
from attnpo.data.prepare import EncodedSet
from attnpo.data.weighing import Weighed
from attnpo.lab.studies.arms import Composed, arm_config
from attnpo.lab.studies.fit_config import FitConfig
from attnpo.lab.studies.reads import Reads, reads_again
from attnpo.lab.studies.scorer_names import scorers_of
from attnpo.lab.studies.scorers import Scorers, compose_scorers, train_scorers
from attnpo.lab.studies.study import ONLY, Arm, Cost, Study, error_text, last_line
from attnpo.models.loading import weights_fingerprint
from attnpo.models.spec import ModelSpec
from attnpo.run.context import RunContext, make_context, open_paths, settle, settle_judge
from attnpo.run.identity import APART, by_class, inputs_of, settings_of
from attnpo.run.inputs import encode, read_pairs
from attnpo.run.run_config import RunConfig
from attnpo.run.weighing import weigh
from attnpo.schema import digest
from attnpo.system.files import clean, file_digest, read_record, write_record
from attnpo.system.machine import versions
from attnpo.system.source_digest import source_digest
from attnpo.weights.base import OnlineSource
from attnpo.weights.pipeline import finished_weights

log = logging.getLogger(__name__)


ANALYSES, COSTS = "analyses", "costs.json"


@dataclass
class Basis:
    """One world and seed.

    ``facts``: what identifies the inputs of every arm (contents, not paths). ``keys``: what identifies an arm's
    captured weights. ``lost``: arms that could not be weighed, with the error. ``measured``: results of the study's
    analyses; ``unmeasured``: those that failed, with the error. ``depths``: layers of each arm's judge. ``gates``:
    whether the judge of this base, and of another base that judges, passed its gate, as far as that was measured.
    ``model``: the base itself. ``scorers``: models that the study trained on these pairs. ``reads``: what each arm's
    weights ask of models.
    """

    world: str
    seed: int
    facts: dict[str, object] = field(default_factory=dict)
    keys: dict[str, dict[str, object]] = field(default_factory=dict)
    depth: int = 1
    lost: dict[str, str] = field(default_factory=dict)
    measured: dict[str, dict[str, object]] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    depths: dict[str, int] = field(default_factory=dict)
    gates: dict[str, bool] = field(default_factory=dict)
    model: ModelSpec | None = None
    scorers: Scorers = field(default_factory=Scorers)
    reads: dict[str, Reads] = field(default_factory=dict)

    @property
    def scorer_paths(self) -> dict[str, str]:
        """Returns the model folders of the scorers."""
        return self.scorers.paths

    @property
    def label(self) -> str:
        """Returns a short name for logs."""
        return f"world {self.world}, seed {self.seed}" if self.world else f"seed {self.seed}"

    @property
    def warnings(self) -> list[str]:
        """Returns a line for every base whose judge missed its gate."""
        return [
            f"WARNING {self.label}: the judge of {name} missed its gate; what its attention does here proves little"
            for name, passed in self.gates.items()
            if not passed
        ]

    def facts_of(self, study: Study, arm: Arm) -> dict[str, object]:
        """Returns what identifies the inputs of one arm: that of another arm's weights moves none of its numbers."""
        return {**self.facts, "weights": self.keys.get(arm.name if arm.layer is None else study.layer_arm, {})}


def compose_arms(cfg: FitConfig, study: Study) -> dict[tuple[str, str], Composed]:
    """Returns the configs of the study's arms by world and name, layers not yet told apart."""
    return {
        (world, name): arm_config(cfg, study, overrides, world)
        for world in study.worlds or [ONLY]
        for name, overrides in study.arms_in(world, cfg.truth is not None).items()
    }


def make_basis(
    cfg: FitConfig,
    study: Study,
    seed: int,
    world: str = ONLY,
    composed: Mapping[tuple[str, str], Composed] | None = None,
    folder: Path | None = None,
    scorers: Mapping[tuple[str, str], Composed] | None = None,
) -> Basis:
    """Returns one world and seed with the store filled; then the study's analyses, kept in ``folder``, if one is given.

    Its scorers are trained first. The points find every weight in the store: one judge pass per base and judge,
    whatever the number of points. An arm that cannot be weighed is lost alone. An exception of any kind when the
    base, the pairs or all arms cannot be had.
    """
    basis = Basis(world, seed)
    composed = compose_arms(cfg, study) if composed is None else composed
    arms = {name: found.changed({"seed": seed}).config for (of, name), found in composed.items() if of == world}
    scorers = compose_scorers(cfg, study) if scorers is None else scorers
    runs = {name: run for (of, name), run in scorers.items() if of == world}
    settled = settle(next(iter(arms.values())))[0]
    configs = {name: with_paths(config, settled) for name, config in arms.items()}
    given = {name: composed[world, name].overrides for name in arms}
    plain = {name: config for name, config in configs.items() if not scorers_of(given[name])}
    trained = [with_paths(run.changed({"seed": seed}).config, settled) for run in runs.values()]
    context = _ground(basis, plain, trained)
    encoded = _facts(basis, context)
    _note_gate(basis, "this base", context.prepared.get("base"))
    basis.scorers = train_scorers(cfg, study, runs, seed, basis.facts)
    done: dict[str, Weighed] = {}
    for name, config in configs.items():
        if name in basis.lost:
            continue
        try:
            config = basis.scorers.filled(config, given[name])
            same = digest({key: value for key, value in inputs_of(config).items() if key != "transforms"})
            if same not in done:
                done[same] = weigh(config.auto_layer.settle(replace(context, cfg=config), encoded), encoded)
                _note_gate(basis, "the second base", settle_judge(config)[1])
        except Exception as error:
            basis.lost[name] = error_text(error)
            if len(basis.lost) == len(configs):
                raise
            continue
        basis.keys[name] = done[same].key
        basis.reads[name] = _reads(config, done[same], encoded["train"])
        basis.depths[name] = done[same].depth
        if not study.layers or name == study.layer_arm:  # the layers told apart are those of that arm's judge
            basis.depth = max(basis.depth, done[same].depth)
    for name, lost in basis.lost.items():
        log.error("%s: arm %s cannot be weighed and is left out: %s", basis.label, name, last_line(lost))
    basis.cost = replace(_cost(context, list(done.values())), scorers=basis.scorers.seconds)
    if folder is not None and study.analyses:
        measure(cfg, study, basis, context, encoded, folder)
    return basis


TIMED = 64  # pairs that a source which asks no model is timed on


def _reads(cfg: FitConfig, weighed: Weighed, encoded: EncodedSet) -> Reads:
    """Returns what the weights of an arm ask of models, with the time that a source without models takes for a pair."""
    seconds, pairs = weighed.seconds, encoded.pairs[:TIMED]
    if not weighed.source.requires and not isinstance(weighed.source, OnlineSource):
        began = time.perf_counter()
        for pair, sides in zip(pairs, encoded.encoded, strict=False):
            finished_weights(weighed.source, None, sides, pair=pair)
        seconds = (time.perf_counter() - began) / max(1, len(pairs))
    return Reads(weighed.reads, seconds, reads_again(cfg), cfg.batch.pairs)


def _ground(basis: Basis, configs: Mapping[str, FitConfig], others: Sequence[FitConfig]) -> RunContext:
    """Returns what all arms stand on, laid for the first of ``configs`` whose weights can be had, else for the first of
    ``others``; the last error where there is none.
    """
    failure: Exception | None = None
    for name, config in [*configs.items(), *((None, other) for other in others)]:
        try:
            return make_context(config)
        except Exception as error:  # noqa: BLE001  raised below, if it is the last
            failure = error
            if name is not None:
                basis.lost[name] = error_text(error)
    raise failure or AssertionError("a study has an arm")


def _note_gate(basis: Basis, name: str, report: object) -> None:
    """Puts into ``basis`` whether a judge passed its gate, where its base was built with one."""
    if isinstance(report, Mapping) and isinstance(report.get("gate_passed"), bool):
        basis.gates[name] = report["gate_passed"]


def _facts(basis: Basis, context: RunContext) -> dict[str, EncodedSet]:
    """Returns the encoded pairs; puts what identifies base, chat format and pairs into ``basis``."""
    pairs = read_pairs(context)
    basis.model = context.model
    basis.facts = {
        "code": {**versions(), "source": source_digest()},
        "world": context.prepared.get("digest"),
        "model": weights_fingerprint(context.model.path, context.model.revision),
        "chat": context.chat.fingerprint(),
        "pairs": {split: found.fingerprint for split, found in pairs.items()},
    }
    return encode(context, pairs)


def with_paths(cfg: FitConfig, settled: RunConfig) -> FitConfig:
    """``cfg`` with the paths of model and data that it lacks as they are in ``settled``."""
    known = {"model.path": settled.model.path, "data.path": getattr(settled.data, "path", None)}
    for key in open_paths(cfg):
        cfg = cfg.with_value(key, known[key])
    return cfg


# ------------------------------------------------------------------------------------------------ analyses


def measure(
    cfg: FitConfig, study: Study, basis: Basis, context: RunContext, encoded: dict[str, EncodedSet], folder: Path
) -> None:
    """Puts the results of the study's analyses into ``basis``, those found in ``folder`` as they are there."""
    own = arm_config(cfg, study, [], basis.world).changed({"seed": basis.seed})
    config = with_paths(own.config, context.cfg)
    values = {key: value for key, value in settings_of(config).items() if key.partition(".")[0] not in APART}
    settings = by_class(cfg.below("study"))
    for name, analysis in study.analyses.items():
        same = digest(
            {
                "facts": {**basis.facts, "analysis": file_digest(Path(inspect.getfile(type(analysis))))},
                "weights": basis.keys,
                "config": values,
                "files": files_of(values),
                "settings": {key: value for key, value in settings.items() if below(key, [f"analyses.{name}"])},
            }
        )
        parts = [name, *([basis.world] if basis.world else []), f"seed{basis.seed}", same[:16]]
        path = folder / ANALYSES / f"{clean('-'.join(parts))}.json"
        if path.is_file():
            known = read_record(path)
            if known is not None and known.get("of") == same:
                log.info("%s: analysis %s is there already and reused", basis.label, name)
                basis.measured[name] = known["found"]
                continue
            log.warning("%s: analysis %s is measured anew: %s is not as it was written", basis.label, name, path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            found = analysis.measure(replace(context, cfg=config), encoded, path.parent)
            found = json.loads(json.dumps(found))  # as a repeated command will read it
        except Exception as error:  # noqa: BLE001  the points run whatever becomes of an analysis
            basis.unmeasured[name] = error_text(error)
            log.error("%s: analysis %s failed: %s", basis.label, name, last_line(error_text(error)))
            continue
        write_record(path, {"of": same, "found": found})
        basis.measured[name] = found


# ------------------------------------------------------------------------------------------------ costs


def _cost(context: RunContext, weighed: list[Weighed]) -> Cost:
    base = context.prepared.get("base")
    seconds = base.get("seconds") if isinstance(base, Mapping) else None
    passes = [found.report.seconds for found in weighed if found.report is not None and found.report.computed]
    return Cost(None if seconds is None else round(float(seconds), 1), round(sum(passes), 1) if passes else None)


def keep_costs(folder: Path, bases: Mapping[tuple[str, int], Basis]) -> None:
    """Adds the seconds of this command's passes to those in ``folder``, and gives every basis the sum."""
    path = folder / COSTS
    stored = read_record(path)
    if stored is None and path.exists():
        log.warning("%s cannot be read and is written anew, without what earlier commands spent", path)
    known = {str(name): float(seconds) for name, seconds in (stored or {}).items()}
    for (world, seed), basis in bases.items():
        name = f"{world}/{seed}"
        if basis.cost.judge is not None:
            known[name] = round(known.get(name, 0.0) + basis.cost.judge, 1)
        basis.cost = replace(basis.cost, judge=known.get(name))
    write_record(path, known)
