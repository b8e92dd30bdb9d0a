"""What the points of one world and seed stand on: base, pairs, one judge pass, and what is measured beside them."""

import inspect
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from attnpo.data.prepare import EncodedSet
from attnpo.files import clean, file_digest, flat, read_record, write_record
from attnpo.machine import versions
from attnpo.models.loading import weights_fingerprint
from attnpo.models.spec import ModelSpec
from attnpo.runs.auto_layer import settle_layer
from attnpo.runs.context import RunContext, make_context, open_paths, settle, settle_judge
from attnpo.runs.identity import APART, below, files_of, inputs_of, settings_of, source_digest
from attnpo.runs.inputs import encode, read_pairs
from attnpo.runs.run_config import RunConfig
from attnpo.runs.weighing import Weighed, weigh
from attnpo.schema import digest
from attnpo.studies.arms import Composed, arm_config
from attnpo.studies.fit_config import FitConfig
from attnpo.studies.study import ONLY, Arm, Cost, Study, error_text, last_line

log = logging.getLogger(__name__)


ANALYSES, COSTS = "analyses", "costs.json"


@dataclass
class Basis:
    """One world and seed.

    ``facts``: what identifies the inputs of every arm (contents, not paths). ``keys``: what identifies an arm's
    captured weights. ``lost``: arms that could not be weighed, with the error. ``measured``: results of the study's
    analyses; ``unmeasured``: those that failed, with the error. ``depths``: layers of each arm's judge. ``gates``:
    whether the judge of this base, and of another base that judges, passed its gate, as far as that was measured.
    ``model``: the base itself.
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

    @property
    def label(self) -> str:
        """A short name for logs."""
        return f"world {self.world}, seed {self.seed}" if self.world else f"seed {self.seed}"

    @property
    def warnings(self) -> list[str]:
        """A line for every base whose judge missed its gate."""
        return [
            f"WARNING {self.label}: the judge of {name} missed its gate; what its attention does here proves little"
            for name, passed in self.gates.items()
            if not passed
        ]

    def facts_of(self, study: Study, arm: Arm) -> dict[str, object]:
        """What identifies the inputs of one arm: that of another arm's weights moves none of its numbers."""
        return {**self.facts, "weights": self.keys.get(arm.name if arm.layer is None else study.layer_arm, {})}


def compose_arms(cfg: FitConfig, study: Study) -> dict[tuple[str, str], Composed]:
    """The configs of the study's arms by world and name, layers not yet told apart."""
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
) -> Basis:
    """One world and seed with the store filled; then the study's analyses, kept in ``folder``, if one is given.

    The points find every weight in the store: one judge pass per base and judge, whatever the number of points. An arm
    that cannot be weighed is lost alone. An exception of any kind when the base, the pairs or all arms cannot be had.
    """
    basis = Basis(world, seed)
    composed = compose_arms(cfg, study) if composed is None else composed
    arms = {name: found.changed({"seed": seed}).config for (of, name), found in composed.items() if of == world}
    settled = settle(next(iter(arms.values())))[0]
    configs = {name: with_paths(config, settled) for name, config in arms.items()}
    context = _ground(basis, configs)
    encoded = _facts(basis, context)
    _note_gate(basis, "this base", context.prepared.get("base"))
    done: dict[str, Weighed] = {}
    for name, config in configs.items():
        if name in basis.lost:
            continue
        same = digest({key: value for key, value in inputs_of(config).items() if key != "transforms"})
        try:
            if same not in done:
                done[same] = weigh(settle_layer(replace(context, cfg=config), encoded), encoded)
                _note_gate(basis, "the second base", settle_judge(config)[1])
        except Exception as error:
            basis.lost[name] = error_text(error)
            if len(basis.lost) == len(configs):
                raise
            continue
        basis.keys[name] = done[same].key
        basis.depths[name] = done[same].depth
        if not study.layers or name == study.layer_arm:  # the layers told apart are those of that arm's judge
            basis.depth = max(basis.depth, done[same].depth)
    for name, lost in basis.lost.items():
        log.error("%s: arm %s cannot be weighed and is left out: %s", basis.label, name, last_line(lost))
    basis.cost = _cost(context, list(done.values()))
    if folder is not None and study.analyses:
        measure(cfg, study, basis, context, encoded, folder)
    return basis


def _ground(basis: Basis, configs: Mapping[str, FitConfig]) -> RunContext:
    """What all arms stand on, laid for the first whose weights can be had; the last error where there is none."""
    for name, config in configs.items():
        try:
            return make_context(config)
        except Exception as error:
            basis.lost[name] = error_text(error)
            if len(basis.lost) == len(configs):
                raise
    raise AssertionError("a study has an arm")


def _note_gate(basis: Basis, name: str, report: object) -> None:
    """Puts into ``basis`` whether a judge passed its gate, where its base was built with one."""
    if isinstance(report, Mapping) and isinstance(report.get("gate_passed"), bool):
        basis.gates[name] = report["gate_passed"]


def _facts(basis: Basis, context: RunContext) -> dict[str, EncodedSet]:
    """The encoded pairs; puts what identifies base, chat format and pairs into ``basis``."""
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
    settings = dict(flat(cfg.below("study")))
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
