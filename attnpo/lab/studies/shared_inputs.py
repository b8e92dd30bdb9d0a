"""Prepares the inputs shared by all points of one world and seed: base, pairs, scorers, weights and analyses."""

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
from attnpo.data.weighing import WeightingResult
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.outcome import SourceCost
from attnpo.lab.studies.plan import StudyPlan
from attnpo.lab.studies.scorers import TrainedScorers, train_scorers
from attnpo.lab.studies.study import ONLY, ROWS, Arm, Study, error_text, last_line, scorer_names_by_key
from attnpo.models.loading import weights_fingerprint
from attnpo.models.spec import ModelSpec
from attnpo.run.identity import APART, make_identity
from attnpo.run.inputs import encode_splits
from attnpo.run.resolve import Readers, ResolvedRun, judge_report, make_judge, resolve, resolve_paths
from attnpo.schema import digest
from attnpo.system.files import file_digest, read_record, safe_filename, write_record
from attnpo.system.machine import package_versions
from attnpo.system.source_digest import source_digest
from attnpo.weights.base import OnlineSource, WeightSource, online_statistics
from attnpo.weights.pipeline import compute_source_weights

log = logging.getLogger(__name__)


ANALYSES, COSTS = "analyses", "costs.json"


@dataclass
class SharedInputs:
    """Inputs shared by all points of one world and seed.

    ``facts``: fingerprints of the inputs that all arms share (contents, not paths). ``keys``: store key of each arm's
    weights. ``depth``: number of layers that the layer arm can be split into; ``depths``: number of layers of each
    arm's judge. ``lost``: errors of arms whose weights could not be computed. ``measured``: results of the study's
    analyses; ``unmeasured``: errors of failed analyses. ``gates``: whether each judge passed its quality gate, if
    measured. ``model``: the base. ``scorers``: models trained on these pairs. ``reads``: cost of each arm's weights.
    ``cost``: seconds spent once for all arms.
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
    scorers: TrainedScorers = field(default_factory=TrainedScorers)
    reads: dict[str, SourceCost] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Returns a short name for logs."""
        return f"world {self.world}, seed {self.seed}" if self.world else f"seed {self.seed}"

    @property
    def warnings(self) -> list[str]:
        """Returns a warning for each judge that failed its quality gate."""
        return [
            f"WARNING {self.label}: the judge of {name} failed its quality gate, so results based on the attention of "
            f"this judge say little"
            for name, passed in self.gates.items()
            if not passed
        ]

    def arm_fingerprint(self, study: Study, arm: Arm) -> dict[str, object]:
        """Returns the fingerprints of one arm's inputs, excluding other arms' weights, which do not affect it."""
        return {**self.facts, "weights": self.keys.get(arm.name if arm.layer is None else study.layer_arm, {})}


def prepare_shared_inputs(plan: StudyPlan, seed: int, world: str = ONLY, folder: Path | None = None) -> SharedInputs:
    """Prepares one world and seed: saves base, pairs, scorers and all weights in the store before any point runs.

    Each judge scores the pairs only once per base, regardless of the number of points. If one arm's weights cannot be
    computed, the other arms continue. If ``folder`` is given, the study's analyses run last and save their results
    there.

    Raises:
        Exception: the base, the pairs or the weights of all arms could not be computed; the type depends on the cause.
    """
    basis, study = SharedInputs(world, seed), plan.study
    arms = {name: found.with_values({"seed": seed}) for (of, name), found in plan.composed.items() if of == world}
    runs = {name: run for (of, name), run in plan.scorers.items() if of == world}
    settled = resolve_paths(next(iter(arms.values())).config)[0]
    known = settled.model.path, getattr(settled.data, "path", None)
    configs = {name: made.config_with_paths(*known) for name, made in arms.items()}
    plain = {name: config for name, config in configs.items() if not scorer_names_by_key(arms[name].overrides)}
    # All arms share the base and pairs of the first arm that resolves without scorers, else of the first scorer.
    candidates = [
        *plain.items(),
        *((None, run.with_values({"seed": seed}).config_with_paths(*known)) for run in runs.values()),
    ]
    ground: ResolvedRun[FitConfig] | None = None
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
    encoded = encode_splits(pairs, base, cfg.lengths).encoded
    _record_gate(basis, "this base", report.get("base"))
    basis.scorers = train_scorers(study.name, runs, seed, basis.facts, plan.store, plan.workers)
    done: dict[str, WeightingResult] = {}
    for name, config in configs.items():
        if name in basis.lost:
            continue
        try:
            for key, path in basis.scorers.model_paths_for(arms[name].overrides).items():
                config = config.with_value(key, path)
            inputs = make_identity(config).inputs
            same = digest({key: value for key, value in inputs.items() if key != "transforms"})
            if same not in done:
                own, second = _arm_readers(readers, config, plan.store)
                source, _ = config.auto_layer.resolve_layer(config.weights, own, encoded["train"])
                done[same] = own.weigh(source, encoded)
                _record_gate(basis, "the second base", second)
        except Exception as error:
            basis.lost[name] = error_text(error)
            if len(basis.lost) == len(configs):
                raise
            continue
        basis.keys[name] = done[same].key
        basis.reads[name] = _source_cost(config.weights, config.batch.pairs, done[same], encoded["train"])
        basis.depths[name] = done[same].depth
        if not study.layers or name == study.layer_arm:  # only this arm is split into layers
            basis.depth = max(basis.depth, done[same].depth)
    for name, lost in basis.lost.items():
        log.error("%s: skipping arm %s, whose weights could not be computed: %s", basis.label, name, last_line(lost))
    built = report.get("base")
    seconds = built.get("seconds") if isinstance(built, Mapping) else None
    passes = [one.report.seconds for one in done.values() if one.report is not None and one.report.computed]
    basis.cost = {} if seconds is None else {"base": round(float(seconds), 1)}
    basis.cost |= {"judge": round(sum(passes), 1)} if passes else {}
    basis.cost |= {} if basis.scorers.training_seconds is None else {"scorers": basis.scorers.training_seconds}
    if folder is not None and study.analyses:
        run_analyses(plan, basis, readers, encoded, folder, data=getattr(cfg.data, "path", None))
    return basis


def _arm_readers(readers: Readers, cfg: FitConfig, store: Path) -> tuple[Readers, dict[str, object]]:
    """Returns the readers that compute an arm's weights, and a report on the judge if it is a separate base."""
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
    return own, {} if made is None else judge_report(made)


TIMED = 64  # pairs used to time a weight source that needs no model


def _source_cost(source: WeightSource, step_pairs: int, weighed: WeightingResult, encoded: EncodedSet) -> SourceCost:
    """Returns the cost of an arm's weights; sources that need no model are timed on a few pairs."""
    seconds, pairs = weighed.seconds, encoded.pairs[:TIMED]
    if not weighed.source.requires and not isinstance(weighed.source, OnlineSource):
        began = time.perf_counter()
        for pair, sides in zip(pairs, encoded.encoded, strict=False):
            compute_source_weights(weighed.source, None, sides, pair=pair)
        seconds = (time.perf_counter() - began) / max(1, len(pairs))
    return SourceCost(weighed.reads, seconds, ROWS if "input_gradient" in online_statistics(source) else 0, step_pairs)


def _record_gate(basis: SharedInputs, name: str, report: object) -> None:
    if isinstance(report, Mapping) and isinstance(report.get("gate_passed"), bool):
        basis.gates[name] = report["gate_passed"]


# ------------------------------------------------------------------------------------------------ analyses


def run_analyses(
    plan: StudyPlan,
    basis: SharedInputs,
    readers: Readers,
    encoded: dict[str, EncodedSet],
    folder: Path,
    data: str | None,
) -> None:
    """Runs the study's analyses and adds the results to ``basis``, reusing those already saved in ``folder``.

    ``data``: path of the pairs.
    """
    own = plan.composer.compose_arm([], basis.world).with_values({"seed": basis.seed})
    config = own.config_with_paths(readers.base.spec.path, data)
    values = {key: value for key, value in make_identity(config).settings.items() if key.partition(".")[0] not in APART}
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
                log.info("%s: reusing the saved result of analysis %s", basis.label, name)
                basis.measured[name] = known["found"]
                continue
            log.warning("%s: %s has changed or is damaged; rerunning analysis %s", basis.label, path, name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            reading, _ = _arm_readers(readers, config, plan.store)
            found = analysis.measure(config.weights, reading, config.truth, encoded, path.parent)
            found = json.loads(json.dumps(found))  # same form as when read back
        except Exception as error:  # noqa: BLE001  a failed analysis does not stop the points
            basis.unmeasured[name] = error_text(error)
            log.error("%s: analysis %s failed: %s", basis.label, name, last_line(error_text(error)))
            continue
        write_record(path, {"of": same, "found": found})
        basis.measured[name] = found


# ------------------------------------------------------------------------------------------------ costs


def save_costs(folder: Path, bases: Mapping[tuple[str, int], SharedInputs]) -> None:
    """Adds this command's judging time in seconds to the totals in ``folder``, and copies the totals to ``bases``."""
    path = folder / COSTS
    stored = read_record(path)
    if stored is None and path.exists():
        log.warning("cannot read %s; replacing it, so the times of earlier commands are lost", path)
    known = {str(name): float(seconds) for name, seconds in (stored or {}).items()}
    for (world, seed), basis in bases.items():
        name = f"{world}/{seed}"
        if "judge" in basis.cost:
            known[name] = round(known.get(name, 0.0) + basis.cost["judge"], 1)
        basis.cost |= {"judge": known[name]} if name in known else {}
    write_record(path, known)
