"""The cases of ``report gains`` as one small file: studies that ran elsewhere are read without their folders."""

import math
from pathlib import Path

from attnpo.lab.analysis.prediction import Case
from attnpo.lab.reports.gains import Harvest
from attnpo.schema import UserError
from attnpo.system.files import read_record, write_record

FILE = "cases.json"


def write_cases(path: Path, level: float, harvest: Harvest) -> None:
    """Writes all cases at KL ``level``, with a digest of the whole; the keys of cases and worlds say what made them."""
    worlds = {name: key for key, name in harvest.names.items()}
    cases = {
        key: {
            "world": worlds[case.world],
            "seed": case.seed,
            "group": case.group,
            "gain": case.gain,
            "known": {name: value for name, value in case.known.items() if math.isfinite(value)},
        }
        for key, case in harvest.cases.items()
    }
    named = {key: name for key, name in harvest.names.items() if any(one["world"] == key for one in cases.values())}
    write_record(path, {"level": level, "worlds": named, "cases": cases, "lost": dict(harvest.lost)})


def read_cases(path: Path, level: float, harvest: Harvest) -> None:
    """Adds the cases of a file to ``harvest``; a world it knows already keeps its name there.

    UserError for a file that another KL level made, that has changed since it was written, or that is none.
    """
    content = read_record(path)
    if content is None or not {"level", "worlds", "cases", "lost"} <= content.keys():
        raise UserError(
            f"{path}: expected the {FILE} of a `report gains`, unchanged since; make it again from the studies' folders"
        )
    if content["level"] != level:
        raise UserError(f"{path}: expected cases at KL {level:g}, it has those at KL {content['level']:g}; give level=")
    taken = set(harvest.names.values())
    for key, name in content["worlds"].items():
        harvest.names.setdefault(key, name if name not in taken else f"{name} ({key[:6]})")
    for key, one in content["cases"].items():
        known = {name: float(value) for name, value in one["known"].items()}
        world = harvest.names[one["world"]]
        harvest.add(key, Case(world, int(one["seed"]), str(one["group"]), float(one["gain"]), known))
    harvest.lost.update(content["lost"])
