"""A study before it runs: refused where it cannot, its arms composed, its size and time told."""

from dataclasses import dataclass
from pathlib import Path

from attnpo.lab.studies.arms import Composed, Composer, check_distinct, check_user, composer_of
from attnpo.lab.studies.benchmark_settings import Evaluations, check_benchmarks, grammar_of
from attnpo.lab.studies.fit_config import FitConfig, require_one_process
from attnpo.lab.studies.live import TIMINGS, Pace
from attnpo.lab.studies.scorers import compose_scorers
from attnpo.lab.studies.study import Arm, Study
from attnpo.lab.studies.workers import Workers
from attnpo.run.folders import store_root
from attnpo.run.identity import by_class, identity_of
from attnpo.run.resolve import open_paths
from attnpo.schema import UserError


@dataclass(frozen=True)
class Plan:
    """A study that was found possible: its seeds, the configs of its arms and of its scorers by world and name.

    ``analyses``: settings of its analyses, by key. ``store``: the folder of what all its runs share. ``timed``:
    what the time of its points is known by: setting, study, and how long one trains.
    """

    composer: Composer
    seeds: list[int]
    composed: dict[tuple[str, str], Composed]
    scorers: dict[tuple[str, str], Composed]
    analyses: dict[str, object]
    evaluations: Evaluations
    workers: Workers
    store: Path
    timed: str

    @property
    def study(self) -> Study:
        """Returns the study."""
        return self.composer.study

    def size(self) -> str:
        """Arms, points and seeds in words; arms of layers that coincide on a shallow model are one later."""
        arms = sum(self._layers(name) for _, name in self.composed)
        about = "up to " if self.study.layers else ""
        seeds = f"{len(self.seeds)} seed{'s' * (len(self.seeds) > 1)}"
        return f"{about}{arms} arms, {self.points // len(self.seeds)} points a seed, {seeds}: {self.points} points"

    @property
    def points(self) -> int:
        """Returns how many points there are, at most."""
        each = (self._layers(name) * len(self.study.grid_of(name).overrides()) for _, name in self.composed)
        return len(self.seeds) * sum(each)

    def _layers(self, arm: str) -> int:
        return len(self.study.layers) if self.study.is_split(arm) else 1

    def pace(self) -> Pace:
        """Returns the time that its points take."""
        return Pace(self.store / TIMINGS, self.timed, self.points, len(self.seeds))


def plan_study(cfg: FitConfig) -> Plan:
    """Returns the plan of ``cfg.study``; loads no model and writes nothing.

    Raises:
        UserError: started under several processes, an override that spoils the study, or an arm that cannot be built.
    """
    study, config_dir = cfg.study, cfg.composed.config_dir
    require_one_process(study, cfg.composed.arguments())
    if study is None:
        raise UserError("there is no study to run (experiment=none)")
    composer = composer_of(cfg, study)
    check_user(composer, identity_of(cfg).result)
    if cfg.resume is not None:
        raise UserError(
            f"study {study.name}: resume={cfg.resume} is for single runs; finished points are reused anyway"
        )
    evaluations = Evaluations(study, config_dir, cfg.trainer.accelerator, grammar_of(cfg.values.get("prepare")))
    check_benchmarks(evaluations, None if "model.path" in open_paths(cfg.model, cfg.data) else cfg.model)
    composed = composer.every_arm()
    for place, arm in composed.items():
        require_built(study, place, arm)
    whole = [place for place in composed if not study.layers or place[1] != study.layer_arm]
    named = [Arm(name, (), None, world, study.grid_of(name)) for world, name in whole]
    check_distinct(study, named, composed)
    seeds = [cfg.seed + i for i in range(cfg.seed_count())]
    return Plan(
        composer,
        seeds,
        composed,
        compose_scorers(composer),
        by_class({"analyses": cfg.below("study").get("analyses")}),
        evaluations,
        Workers(study.workers, config_dir, cfg.store, cfg.lock_timeout),
        store_root(cfg.store),
        f"{cfg.composed.choices.get('setting', 'none')}/{study.name}/{cfg.trainer.max_epochs}/{cfg.trainer.max_steps}",
    )


def require_built(study: Study, arm: tuple[str, str], made: Composed) -> None:
    """Raises UserError naming the arm whose config cannot be built."""
    try:
        _ = made.config
    except UserError as error:
        raise UserError(f"study {study.name}, arm {': '.join(filter(None, arm))}: {error}") from error
