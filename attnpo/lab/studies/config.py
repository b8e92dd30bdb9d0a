"""All keys of ``configs/fit.yaml``, ``weigh.yaml`` and ``show.yaml`` as typed roots."""

from dataclasses import dataclass, field
from typing import ClassVar

from attnpo.cli.terminal import command_text
from attnpo.lab.studies.study import Grid, Study
from attnpo.run.run_config import RunConfig
from attnpo.run.show_config import ShowConfig
from attnpo.schema import BOOKKEEPING, UserError
from attnpo.system.processes import describe_launcher, world_size


def require_one_process(study: Study | None, arguments: list[str]) -> None:
    """Raises UserError for a study in a job of several processes, naming what started them and what to do.

    ``arguments``: what the command was given.
    """
    if study is None or world_size() == 1:
        return
    name, instead = describe_launcher()
    raise UserError(
        f"study {study.name} was started with {world_size()} processes by {name}, and a study starts its own: run "
        f"it as one process (`{instead}{command_text('fit', *arguments)}`), or a single run "
        f"under {name}: experiment=none"
    )


@dataclass(frozen=True)
class FitConfig(RunConfig):
    """One run, or the study built from it; a field per key of ``configs/fit.yaml``, where each is explained."""

    default_layer: int | str = field(default="last", metadata=BOOKKEEPING)
    verbalized_epochs: int = field(default=1, metadata=BOOKKEEPING)
    live_reference: str = field(default="live", metadata=BOOKKEEPING)
    grid: Grid = field(default_factory=Grid, metadata=BOOKKEEPING)
    grids: dict[str, Grid] = field(default_factory=dict, metadata=BOOKKEEPING)
    seeds: int | None = field(default=None, metadata=BOOKKEEPING)
    study: Study | None = field(default=None, metadata=BOOKKEEPING)

    def __post_init__(self) -> None:
        if self.seeds is not None and self.seeds < 1:
            raise UserError(f"seeds: expected at least 1, or null to leave it to the study, got {self.seeds}")
        if self.verbalized_epochs < 1:
            raise UserError(f"verbalized_epochs: expected at least 1, got {self.verbalized_epochs}")
        if self.study is not None:
            sets = [item for overrides in self.study.worlds.values() for item in overrides]
            knobs = [item.partition("=")[0] for item in sets if item.startswith("prepare.")]
            if knobs and self.prepare is None:
                raise UserError(
                    f"study {self.study.name}: its worlds set {knobs[0]}, and this setting builds no world "
                    "(prepare=null): leave setting= out, or choose setting=testbed"
                )
        super().__post_init__()

    def seed_count(self) -> int:
        """Returns how many seeds are counted from ``seed``: as many as are asked for, else the study's."""
        return self.seeds or (1 if self.study is None else self.study.seeds)

    def title(self) -> str:
        """Returns what a folder without a name is called, before its time stamp."""
        return super().title() if self.study is None else self.study.name

    def headline(self) -> str:
        """Returns what is about to be done: of a study what is compared, and its size."""
        if self.study is None:
            return super().headline()
        return f"study {self.study.name}: {self.study.title or ', '.join(self.study.arms)}"

    def budget(self) -> str:
        """Returns how long is trained: of a study each point."""
        return super().budget() if self.study is None else f"{super().budget()} a point, {self.seed_count()} seeds"

    def grid_note(self) -> str:
        """Returns the grid that a study's arms get."""
        return "" if self.study is None else f" (each arm's grid: {self.study.grid})"

    def kept_folder(self) -> str | None:
        """Returns the folder of a study that goes on with its finished points: its name and the setting's."""
        if self.study is None or self.study.restart:
            return None
        return f"{self.study.name}-{self.composed.choices.get('setting', 'setting')}"

    def check_combination(self) -> None:
        """Raises UserError for components that do not go together; a study's arms may choose them anew."""
        if self.study is None:
            super().check_combination()

    def chosen_later(self) -> frozenset[str]:
        """Returns the groups that arms or worlds choose, or benchmarks, which ask for a model of each point."""
        if self.study is None:
            return frozenset()
        study = self.study
        sets = [*study.arms_with(truth=True).values(), *study.worlds.values(), list(study.shared)]
        sets += [["callbacks"]] if study.benchmarks else []
        return frozenset(
            item.partition("=")[0].lstrip("+~").partition(".")[0] for overrides in sets for item in overrides
        )

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason."""
        if self.study is None:
            idle = dict.fromkeys(("grid", "grids", "seeds"), "there is no study (experiment=none)")
            return {**super().unread(), **idle}
        # Grids that no arm gets. A study reads them by value, so that one equal to a grid in use counts as used.
        used = [self.study.grid, *self.study.grids.values()]
        named = {"grid": self.grid, **{f"grids.{name}": grid for name, grid in self.grids.items()}}
        idle = {name: f"study {self.study.name} does not use it" for name, grid in named.items() if grid not in used}
        return {**super().unread(), **idle}


@dataclass(frozen=True)
class WeighConfig(FitConfig):
    """Root configuration of ``attnpo.weigh``.

    ``export``: the file (.parquet or .jsonl) that gets the training pairs' weights. ``prune``: in the place of all
    else, prepared rows that no run has opened for so many days are removed from the store.
    """

    trains: ClassVar[bool] = False

    export: str | None = field(default=None, metadata=BOOKKEEPING)
    prune: float | None = field(default=None, metadata=BOOKKEEPING)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prune is not None and not self.prune >= 0:
            raise UserError(f"prune: expected a number of days, 0 or more, got {self.prune}")


@dataclass(frozen=True)
class ShowRoot(ShowConfig, FitConfig):
    """Configuration of ``attnpo.show``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.study is not None:
            raise UserError(f"experiment={self.study.name} is a study, and pairs are shown of one run: leave it out")
