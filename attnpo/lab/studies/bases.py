"""Inputs that all points of one world and seed share: base, pairs, one judge pass, and what is measured beside them."""

import inspect
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from attnpo.cli.terminal import command_text
from attnpo.config.named_files import digest_named_files, is_at_or_below
from attnpo.data.prepare import EncodedSet
from attnpo.data.prepared import read_pairs
from attnpo.data.weighing import Weighed
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.outcome import Reads
from attnpo.lab.studies.plan import StudyPlan
from attnpo.lab.studies.scorers import Scorers, train_scorers
from attnpo.lab.studies.study import ONLY, ROWS, Arm, Study, error_text, last_line, scorers_of
from attnpo.models.loading import weights_fingerprint
from attnpo.models.spec import ModelSpec
from attnpo.run.identity import APART, identity_of
from attnpo.run.inputs import encode
from attnpo.run.resolve import Readers, Resolved, make_judge, report_of, resolve, settle
from attnpo.schema import digest
from attnpo.system.files import file_digest, read_record, safe_filename, write_record
from attnpo.system.machine import package_versions
from attnpo.system.source_digest import source_digest
from attnpo.weights.base import OnlineSource, WeightSource, online_reads
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
    cost: dict[str, float] = field(default_factory=dict)
    depths: dict[str, int] = field(default_factory=dict)
    gates: dict[str, bool] = field(default_factory=dict)
    model: ModelSpec | None = None
    scorers: Scorers = field(default_factory=Scorers)
    reads: dict[str, Reads] = field(default_factory=dict)

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


def make_basis(plan: StudyPlan, seed: int, world: str = ONLY, folder: Path | None = None) -> Basis:
    """Returns one world and seed with the store filled; then the study's analyses, kept in ``folder``, if one is given.

    Its scorers are trained first. The points find every weight in the store: one judge pass per base and judge,
    whatever the number of points. An arm that cannot be weighed is lost alone. An exception of any kind when the
    base, the pairs or all arms cannot be had.
    """
    basis, study = Basis(world, seed), plan.study
    arms = {name: found.with_values({"seed": seed}) for (of, name), found in plan.composed.items() if of == world}
    runs = {name: run for (of, name), run in plan.scorers.items() if of == world}
    settled = settle(next(iter(arms.values())).config)[0]
    known = settled.model.path, getattr(settled.data, "path", None)
    configs = {name: made.with_paths(*known) for name, made in arms.items()}
    plain = {name: config for name, config in configs.items() if not scorers_of(arms[name].overrides)}
    # All arms stand on what is laid for the first whose weights can be had, else for the first scorer.
    candidates = [
        *plain.items(),
        *((None, run.with_values({"seed": seed}).with_paths(*known)) for run in runs.values()),
    ]
    ground: Resolved[FitConfig] | None = None
    for name, config in candidates:
        try:
            ground = resolve(config)
            break
        except Exception as error:
            if name is not None:
                basis.lost[name] = error_text(error)
            if config is candidates[-1][1]:
                raise
    assert ground is not None, "a study has an arm"
    cfg, base, readers, report = ground
    pairs = read_pairs(cfg.data, cfg.weights, base.store)
    basis.model = base.spec
    basis.facts = {
        "code": {**package_versions(), "source": source_digest()},
        "world": report.get("digest"),
        "model": weights_fingerprint(base.spec.path, base.spec.revision),
        "chat": base.chat.fingerprint(),
        "pairs": {split: found.fingerprint for split, found in pairs.items()},
    }
    encoded = encode(pairs, base, cfg.lengths).encoded
    _note_gate(basis, "this base", report.get("base"))
    basis.scorers = train_scorers(study.name, runs, seed, basis.facts, plan.store, plan.workers)
    done: dict[str, Weighed] = {}
    for name, config in configs.items():
        if name in basis.lost:
            continue
        try:
            for key, path in basis.scorers.paths_for(arms[name].overrides).items():
                config = config.with_value(key, path)
            inputs = identity_of(config).inputs
            same = digest({key: value for key, value in inputs.items() if key != "transforms"})
            if same not in done:
                own, second = _readers(readers, config, plan.store)
                source, _ = config.auto_layer.settle(config.weights, own, encoded["train"])
                done[same] = own.weigh(source, encoded)
                _note_gate(basis, "the second base", second)
        except Exception as error:
            basis.lost[name] = error_text(error)
            if len(basis.lost) == len(configs):
                raise
            continue
        basis.keys[name] = done[same].key
        basis.reads[name] = _reads(config.weights, config.batch.pairs, done[same], encoded["train"])
        basis.depths[name] = done[same].depth
        if not study.layers or name == study.layer_arm:  # the layers told apart are those of that arm's judge
            basis.depth = max(basis.depth, done[same].depth)
    for name, lost in basis.lost.items():
        log.error("%s: arm %s cannot be weighed and is left out: %s", basis.label, name, last_line(lost))
    built = report.get("base")
    seconds = built.get("seconds") if isinstance(built, Mapping) else None
    passes = [one.report.seconds for one in done.values() if one.report is not None and one.report.computed]
    basis.cost = {} if seconds is None else {"base": round(float(seconds), 1)}
    basis.cost |= {"judge": round(sum(passes), 1)} if passes else {}
    basis.cost |= {} if basis.scorers.seconds is None else {"scorers": basis.scorers.seconds}
    if folder is not None and study.analyses:
        measure(plan, basis, readers, encoded, folder, data=getattr(cfg.data, "path", None))
    return basis


def _readers(readers: Readers, cfg: FitConfig, store: Path) -> tuple[Readers, dict[str, object]]:
    """Returns what an arm's weights are read with on the same base, and the report of its judge's base."""
    made = make_judge(cfg.judge, cfg.weights, cfg.prepare, store / "prepared")
    own = replace(
        readers,
        judge=cfg.judge if made is None else replace(cfg.judge, path=str(made.path)),
        verbalizer=cfg.verbalizer,
        lengths=cfg.lengths,
        align=cfg.align.method,
        length_from=getattr(cfg.objective, "length_from", None),
        command=command_text("weigh", *cfg.composed.arguments()),
    )
    return own, {} if made is None else report_of(made)


TIMED = 64  # pairs that a source which asks no model is timed on


def _reads(source: WeightSource, step_pairs: int, weighed: Weighed, encoded: EncodedSet) -> Reads:
    """Returns what the weights of an arm ask of models, with the time that a source without models takes for a pair."""
    seconds, pairs = weighed.seconds, encoded.pairs[:TIMED]
    if not weighed.source.requires and not isinstance(weighed.source, OnlineSource):
        began = time.perf_counter()
        for pair, sides in zip(pairs, encoded.encoded, strict=False):
            finished_weights(weighed.source, None, sides, pair=pair)
        seconds = (time.perf_counter() - began) / max(1, len(pairs))
    return Reads(weighed.reads, seconds, ROWS if "input_gradient" in online_reads(source) else 0, step_pairs)


def _note_gate(basis: Basis, name: str, report: object) -> None:
    if isinstance(report, Mapping) and isinstance(report.get("gate_passed"), bool):
        basis.gates[name] = report["gate_passed"]


# ------------------------------------------------------------------------------------------------ analyses


def measure(
    plan: StudyPlan, basis: Basis, readers: Readers, encoded: dict[str, EncodedSet], folder: Path, data: str | None
) -> None:
    """Puts the results of the study's analyses into ``basis``, those found in ``folder`` as they are there.

    ``data``: the path of the pairs.
    """
    own = plan.composer.arm([], basis.world).with_values({"seed": basis.seed})
    config = own.with_paths(readers.base.spec.path, data)
    values = {key: value for key, value in identity_of(config).settings.items() if key.partition(".")[0] not in APART}
    for name, analysis in plan.study.analyses.items():
        same = digest(
            {
                "facts": {**basis.facts, "analysis": file_digest(Path(inspect.getfile(type(analysis))))},
                "weights": basis.keys,
                "config": values,
                "files": digest_named_files(values),
                "settings": {
                    key: value for key, value in plan.analyses.items() if is_at_or_below(key, [f"analyses.{name}"])
                },
            }
        )
        parts = [name, *([basis.world] if basis.world else []), f"seed{basis.seed}", same[:16]]
        path = folder / ANALYSES / f"{safe_filename('-'.join(parts))}.json"
        if path.is_file():
            known = read_record(path)
            if known is not None and known.get("of") == same:
                log.info("%s: analysis %s is there already and reused", basis.label, name)
                basis.measured[name] = known["found"]
                continue
            log.warning("%s: analysis %s is measured anew: %s is not as it was written", basis.label, name, path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            reading, _ = _readers(readers, config, plan.store)
            found = analysis.measure(config.weights, reading, config.truth, encoded, path.parent)
            found = json.loads(json.dumps(found))  # as a repeated command will read it
        except Exception as error:  # noqa: BLE001  the points run whatever becomes of an analysis
            basis.unmeasured[name] = error_text(error)
            log.error("%s: analysis %s failed: %s", basis.label, name, last_line(error_text(error)))
            continue
        write_record(path, {"of": same, "found": found})
        basis.measured[name] = found


# ------------------------------------------------------------------------------------------------ costs


def keep_costs(folder: Path, bases: Mapping[tuple[str, int], Basis]) -> None:
    """Adds the seconds of this command's passes to those in ``folder``, and gives every basis the sum."""
    path = folder / COSTS
    stored = read_record(path)
    if stored is None and path.exists():
        log.warning("%s cannot be read and is written anew, without what earlier commands spent", path)
    known = {str(name): float(seconds) for name, seconds in (stored or {}).items()}
    for (world, seed), basis in bases.items():
        name = f"{world}/{seed}"
        if "judge" in basis.cost:
            known[name] = round(known.get(name, 0.0) + basis.cost["judge"], 1)
        basis.cost |= {"judge": known[name]} if name in known else {}
    write_record(path, known)
