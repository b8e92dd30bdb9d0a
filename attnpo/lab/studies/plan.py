"""A study before it runs: refused where it cannot, its arms composed, its size and time told."""

from dataclasses import dataclass

from attnpo.lab.studies.arms import Composed, check_distinct, check_user
from attnpo.lab.studies.bases import compose_arms
from attnpo.lab.studies.benchmarks import check_benchmarks
from attnpo.lab.studies.fit_config import FitConfig, require_one_process
from attnpo.lab.studies.live import Pace
from attnpo.lab.studies.scorers import compose_scorers
from attnpo.lab.studies.study import Arm, Study
from attnpo.schema import UserError


@dataclass(frozen=True)
class Plan:
    """A study that was found possible: its seeds, the configs of its arms and of its scorers by world and name."""

    study: Study
    seeds: list[int]
    composed: dict[tuple[str, str], Composed]
    scorers: dict[tuple[str, str], Composed]

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

    def pace(self, cfg: FitConfig) -> Pace:
        """Returns the time that its points take."""
        return Pace(cfg, self.study.name, self.points, len(self.seeds))


def plan_study(cfg: FitConfig) -> Plan:
    """Returns the plan of ``cfg.study``; loads no model and writes nothing.

    Raises:
        UserError: started under several processes, an override that spoils the study, or an arm that cannot be built.
    """
    require_one_process(cfg)
    study = cfg.study
    if study is None:
        raise UserError("there is no study to run (experiment=none)")
    check_user(cfg, study)
    if cfg.resume is not None:
        raise UserError(
            f"study {study.name}: resume={cfg.resume} is for single runs; finished points are reused anyway"
        )
    check_benchmarks(cfg)
    composed = compose_arms(cfg, study)
    for place, arm in composed.items():
        require_built(study, place, arm)
    whole = [place for place in composed if not study.layers or place[1] != study.layer_arm]
    named = [Arm(name, (), None, world, study.grid_of(name)) for world, name in whole]
    check_distinct(study, named, {place: composed[place].config for place in whole})
    seeds = [cfg.seed + i for i in range(cfg.seed_count())]
    return Plan(study, seeds, composed, compose_scorers(cfg, study))


def require_built(study: Study, arm: tuple[str, str], made: Composed) -> None:
    """Raises UserError naming the arm whose config cannot be built."""
    try:
        _ = made.config
    except UserError as error:
        raise UserError(f"study {study.name}, arm {': '.join(filter(None, arm))}: {error}") from error
