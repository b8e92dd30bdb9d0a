"""Config of ``attnpo.show``, with the keys of ``configs/show.yaml``. Read before any model loads."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from attnpo.data.base import PairSet
from attnpo.display.heat import WEIGHTS
from attnpo.run.run_config import TRAINING, RunConfig
from attnpo.schema import BOOKKEEPING, Message, PreferencePair, UserError, check_choice

LOGPS = ("logp", "reference_logp", "log_ratio", "contribution")
COLUMNS = (*WEIGHTS, *LOGPS)
MEAN, ROUNDS = "mean", ("mean", "1", "2")
ALL = "all"
ENDINGS = (".jsonl", ".csv", ".parquet", ".html")


@dataclass(frozen=True)
class CommandLinePair:
    """One pair from the command line, used instead of a run's data (config node ``data``)."""

    prompt: str
    chosen: str
    rejected: str

    def load(self, split: str) -> PairSet:
        """Returns the pair as split "train"; split "val" is empty."""
        if split != "train":
            return PairSet([])
        turn = Message(role="user", content=self.prompt)
        return PairSet([PreferencePair.from_texts([turn], self.chosen, self.rejected)], read=1)


@dataclass(frozen=True)
class ShowConfig(RunConfig):
    """Config for showing pairs token by token. ``configs/show.yaml`` explains the keys that it adds."""

    trains: ClassVar[bool] = False

    prompt: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    run: str | None = field(default=None, metadata=BOOKKEEPING)
    bad_batch: str | None = field(default=None, metadata=BOOKKEEPING)
    policy: str | None = field(default=None, metadata=BOOKKEEPING)
    split: str = "train"
    rows: str = "1"
    ids: tuple[str, ...] = ()
    column: str = "relative"
    layers: tuple[int | str, ...] = ()
    rounds: tuple[int | str, ...] = (MEAN,)
    stages: tuple[str, ...] = ()
    out: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("column", self.column, COLUMNS)
        check_choice("split", self.split, ("train", "val"))
        for one in self.rounds:
            check_choice("rounds", str(one), ROUNDS)
        if not self.rounds:
            raise UserError(f"rounds: expected at least one of {', '.join(ROUNDS)}, got none")
        if self.run is not None and self.bad_batch is not None:
            raise UserError("run= and bad_batch= cannot be combined: set only one of them")
        if self.out not in (None, "-") and not self.out.endswith(ENDINGS):
            raise UserError(f"out={self.out}: expected a file with extension {', '.join(ENDINGS)}, or - to print JSONL")
        if self.out is not None and self.out.endswith(".html") and self.column not in WEIGHTS:
            raise UserError(f"out={self.out}: a page shows only weights, not column={self.column}: set column=relative")

    @property
    def reads_logps(self) -> bool:
        """Returns whether models need to score the tokens."""
        return self.column in LOGPS

    def out_file(self) -> Path | None:
        """Returns the file to write to, or None to print instead."""
        return None if self.out in (None, "-") else Path(str(self.out)).expanduser()

    def unused_keys(self) -> dict[str, str]:
        """Returns the keys that have no effect given the other settings, mapped to the reasons."""
        found = {**super().unused_keys(), **dict.fromkeys(TRAINING, "show trains nothing")}
        found |= dict.fromkeys(("drift", "truth", "seed", "layout"), "show trains nothing")
        if self.run is not None or self.bad_batch is not None:
            which = "the run's own data" if self.run is not None else "a saved step"
            names = ["weights", "judge", "data", "transforms", "lengths", "align", "objective", "prepare", "store"]
            found |= dict.fromkeys(names if self.run is None else [*names, "model"], f"show displays {which}")
        if self.bad_batch is not None:
            found |= dict.fromkeys(("policy", "split", "layers", "rounds", "stages"), "show displays a saved step")
        elif not self.reads_logps:
            found["policy"] = f"column={self.column} reads no log-probs"
        if self.ids:
            found["rows"] = "ids= names the pairs"
        return found
