"""Typed root configs for ``configs/fit.yaml``, ``weigh.yaml`` and ``show.yaml``."""

from dataclasses import dataclass, field
from typing import ClassVar

from attnpo.cli.terminal import command_text
from attnpo.lab.studies.study import Grid, Study
from attnpo.run.run_config import RunConfig
from attnpo.run.show_config import ShowConfig
from attnpo.schema import BOOKKEEPING, UserError
from attnpo.system.processes import describe_launcher, world_size


def require_one_process(study: Study | None, arguments: list[str]) -> None:
    """Checks that a study runs in a single process; ``arguments`` are the command-line arguments.

    Raises:
        UserError: the job has several processes; the message names the launcher and the command to use instead.
    """
    if study is None or world_size() == 1:
        return
    name, instead = describe_launcher()
    raise UserError(
        f"study {study.name} was started with {world_size()} processes by {name}, but a study starts its own "
        f"processes: run it as one process (`{instead}{command_text('fit', *arguments)}`), or use experiment=none "
        f"for a single run under {name}"
    )


@dataclass(frozen=True)
class FitConfig(RunConfig):
    """Root config of ``attnpo.fit``, for a single run or a study. Keys are documented in ``configs/fit.yaml``."""

    default_layer: int | str = field(default="last", metadata=BOOKKEEPING)
    verbalized_epochs: int = field(default=1, metadata=BOOKKEEPING)
    live_reference: str = field(default="live", metadata=BOOKKEEPING)
    grid: Grid = field(default_factory=Grid, metadata=BOOKKEEPING)
    grids: dict[str, Grid] = field(default_factory=dict, metadata=BOOKKEEPING)
    seeds: int | None = field(default=None, metadata=BOOKKEEPING)
    study: Study | None = field(default=None, metadata=BOOKKEEPING)

    def __post_init__(self) -> None:
        if self.seeds is not None and self.seeds < 1:
            raise UserError(f"seeds: expected at least 1, or null for the study's default, got {self.seeds}")
        if self.verbalized_epochs < 1:
            raise UserError(f"verbalized_epochs: expected at least 1, got {self.verbalized_epochs}")
        if self.study is not None:
            sets = [item for overrides in self.study.worlds.values() for item in overrides]
            knobs = [item.partition("=")[0] for item in sets if item.startswith("prepare.")]
            if knobs and self.prepare is None:
                raise UserError(
                    f"study {self.study.name}: the study's worlds set {knobs[0]}, but this setting builds no worlds "
                    "(prepare=null): remove setting=, or use setting=testbed"
                )
        super().__post_init__()

    def seed_count(self) -> int:
        """Returns the number of consecutive seeds, starting at ``seed``: ``seeds`` if set, else the study's default."""
        return self.seeds or (1 if self.study is None else self.study.seeds)

    def default_name(self) -> str:
        """Returns the default name of the run folder, without a timestamp."""
        return super().default_name() if self.study is None else self.study.name

    def headline(self) -> str:
        """Describes the command in one line; for a study, by its name and its title or, without a title, its arms."""
        if self.study is None:
            return super().headline()
        return f"study {self.study.name}: {self.study.title or ', '.join(self.study.arms)}"

    def budget(self) -> str:
        """Describes the training length; for a study, the length per grid point and the number of seeds."""
        return super().budget() if self.study is None else f"{super().budget()} per point, {self.seed_count()} seeds"

    def grid_note(self) -> str:
        """Returns a note on the default grid of a study's arms; empty for a single run."""
        return "" if self.study is None else f" (each arm's grid: {self.study.grid})"

    def reusable_folder(self) -> str | None:
        """Returns the folder name (study and setting) that a repeated study command reuses; None if there is none."""
        if self.study is None or self.study.restart:
            return None
        return f"{self.study.name}-{self.composed.choices.get('setting', 'setting')}"

    def check_combination(self) -> None:
        """Checks that the components of a single run are compatible; studies are checked separately for each arm."""
        if self.study is None:
            super().check_combination()

    def groups_set_by_runs(self) -> frozenset[str]:
        """Returns the config groups that the study sets for its runs, through arms, worlds or benchmarks."""
        if self.study is None:
            return frozenset()
        study = self.study
        sets = [*study.all_arms(truth=True).values(), *study.worlds.values(), list(study.shared)]
        sets += [["callbacks"]] if study.benchmarks else []
        return frozenset(
            item.partition("=")[0].lstrip("+~").partition(".")[0] for overrides in sets for item in overrides
        )

    def unused_keys(self) -> dict[str, str]:
        """Returns the config keys that have no effect in this command, with the reasons."""
        if self.study is None:
            idle = dict.fromkeys(("grid", "grids", "seeds"), "there is no study (experiment=none)")
            return {**super().unused_keys(), **idle}
        # Grids that no arm uses. The study holds copies, so a grid equal to one in use counts as used.
        used = [self.study.grid, *self.study.grids.values()]
        named = {"grid": self.grid, **{f"grids.{name}": grid for name, grid in self.grids.items()}}
        idle = {name: f"study {self.study.name} does not use it" for name, grid in named.items() if grid not in used}
        return {**super().unused_keys(), **idle}


@dataclass(frozen=True)
class WeighConfig(FitConfig):
    """Root config of ``attnpo.weigh``.

    ``export``: file (.parquet or .jsonl) to write the training pairs' weights to. ``prune``: number of days. If set,
    the command only cleans up the store: it deletes prepared data that no run has opened for this many days.
    """

    trains: ClassVar[bool] = False

    export: str | None = field(default=None, metadata=BOOKKEEPING)
    prune: float | None = field(default=None, metadata=BOOKKEEPING)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prune is not None and not self.prune >= 0:
            raise UserError(f"prune: expected a number of days, at least 0, got {self.prune}")


@dataclass(frozen=True)
class ShowRoot(ShowConfig, FitConfig):
    """Root config of ``attnpo.show``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.study is not None:
            raise UserError(
                f"experiment={self.study.name} is a study, but `attnpo.show` shows pairs of a single run: remove "
                f"experiment="
            )
