"""Runs a study: every base judged once, points run (two at a time on a laptop), finished ones reused, all collected."""

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnpo.config import build, check, compose, plain
from attnpo.console import world_size
from attnpo.models.loading import weights_fingerprint
from attnpo.schema import UserError, digest
from attnpo.studies.account import versions
from attnpo.studies.folders import make_folder
from attnpo.studies.grid import Arm, Point, Study, expand_arms, grid_record, make_points
from attnpo.studies.ground import lay_ground
from attnpo.studies.inputs import encode, read_pairs
from attnpo.studies.publish import study_overrides
from attnpo.studies.resume import RESULT
from attnpo.studies.run import run
from attnpo.studies.weighing import weigh

log = logging.getLogger(__name__)

# Parts of a config that change no number of a run.
BOOKKEEPING = ("name", "output", "store", "resume", "logger", "study", "grid", "seeds", "composed")


@dataclass(frozen=True)
class Outcome:
    """A finished study: its points with their results, those that failed with their errors, the grid's digest."""

    study: Study
    arms: list[Arm]
    points: list[tuple[Point, dict[str, Any]]]
    failed: list[tuple[Point, str]]
    record: dict[str, Any]
    folder: Path
    seconds: float

    @property
    def digest(self) -> str:
        """Digest of world, grid and arms, fixed before the points ran."""
        return digest(self.record)[:16]


def key_of(override: str) -> str:
    """The key or group an override sets."""
    return override.split("=", 1)[0].lstrip("+~")


def layered(*layers: Sequence[str]) -> list[str]:
    """Overrides of all layers; a later layer's override replaces earlier ones of the same key."""
    merged: dict[str, str] = {}
    for override in (item for layer in layers for item in layer):
        merged.pop(key_of(override), None)
        merged[key_of(override)] = override
    return list(merged.values())


def arm_config(cfg: DictConfig, study: Study, overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """The composed config of one arm, and the overrides that give it on the command line.

    The user's overrides come first, the arm's win. A user's ``weights.layer=2`` goes to the arms that have such a key
    and is left out, with a log line, where an arm's own choice of the group has none.
    """
    user = list(cfg.composed.get("overrides", []))
    single = ["study=none", "seeds=null", *study_overrides(cfg, study.name)]
    try:
        merged = layered(study.shared, user, overrides, single)
        return compose("fit", merged, config_dir(cfg)), merged
    except UserError:
        groups = {key_of(override) for override in overrides if "." not in key_of(override)}
        foreign = [
            override for override in user if key_of(override).split(".")[0] in groups and "." in key_of(override)
        ]
        if not foreign:
            raise
        log.info("arm %s: %s does not apply and is left out", " ".join(overrides), " ".join(foreign))
        merged = layered(study.shared, [override for override in user if override not in foreign], overrides, single)
        return compose("fit", merged, config_dir(cfg)), merged


def check_user(cfg: DictConfig, study: Study) -> None:
    """Nothing; refuses an override of a group that the study's arms choose themselves."""
    chosen = {key_of(item) for overrides in study.arms.values() for item in overrides if "." not in key_of(item)}
    clash = [override for override in cfg.composed.get("overrides", []) if key_of(override) in chosen]
    if clash:
        raise UserError(
            f"study {study.name} chooses {', '.join(sorted(chosen))} for each of its arms, so {' '.join(clash)} would "
            "be lost: leave it out, or add study=none for a single run"
        )
    for override in cfg.composed.get("overrides", []):
        group, dot, _ = key_of(override).partition(".")
        if dot and group in chosen and not any(applies(cfg, override, arm) for arm in study.arms.values()):
            compose("fit", layered([override], next(iter(study.arms.values())), ["study=none"]), config_dir(cfg))


def applies(cfg: DictConfig, override: str, arm: Sequence[str]) -> bool:
    """Whether an arm's config has the key of ``override``."""
    try:
        compose("fit", layered([override], arm, ["study=none"]), config_dir(cfg))
    except UserError:
        return False
    return True


def point_config(arm: tuple[DictConfig, list[str]], point: Point) -> tuple[DictConfig, list[str]]:
    """A point's own config and overrides, from those of its arm."""
    cfg, overrides = arm[0].copy(), layered(arm[1], [*point.values, f"seed={point.seed}"])
    for key, value in (override.split("=", 1) for override in (*point.values, f"seed={point.seed}")):
        OmegaConf.update(cfg, key, yaml_value(value))
    cfg.composed.overrides = overrides
    return cfg, overrides


def yaml_value(text: str) -> Any:
    """The value an override's text stands for."""
    return OmegaConf.create(f"value: {text}").value


def config_dir(cfg: DictConfig) -> Path | None:
    """The user's own config folder this config was composed with, if any."""
    given = cfg.composed.get("config_dir")
    return None if given is None else Path(given)


def point_folder(folder: Path, point: Point, cfg: DictConfig, facts: Mapping[str, Any]) -> Path:
    """Where a point's results lie: named by arm, grid values, seed, and the digest of everything that moves a number.

    That is the composed config and ``facts``: what the files it names hold, and the versions of the code.
    """
    values = numbers_of(cfg)
    settings = [value.partition("=") for value in point.values]
    name = "-".join([point.arm.name, *(f"{key.rpartition('.')[-1]}={value}" for key, _, value in settings)])
    clean = "".join(letter if letter.isalnum() or letter in "=.-" else "_" for letter in name)
    return folder / "points" / f"{clean}-seed{point.seed}-{digest({'config': values, 'facts': dict(facts)})[:8]}"


def run_study(cfg: DictConfig, folder: Path) -> Outcome:
    """All points of ``cfg.study``; results stay in ``folder``, so that a repeated command runs only what is missing.

    Raises:
        UserError: started under several processes, or every point failed.
    """
    if world_size() > 1:
        raise UserError(
            f"study {cfg.study.name} was started with {world_size()} processes; a study starts its own. Run it without "
            "torchrun, or run single points under it with study=none"
        )
    study: Study = build(cfg.study)
    check_user(cfg, study)
    if cfg.resume is not None:
        raise UserError(
            f"study {study.name}: resume={cfg.resume} is for single runs; finished points are reused anyway"
        )
    began = time.perf_counter()
    make_folder(folder)
    seeds = [cfg.seed + i for i in range(cfg.seeds if cfg.seeds is not None else study.seeds)]
    facts = {seed: judge_once(cfg, study, seed) for seed in seeds}
    arms = expand_arms(study, facts[seeds[0]]["depth"])
    composed = {arm.name: arm_config(cfg, study, arm.overrides) for arm in arms}
    for config, _ in composed.values():
        check(config, complete=False)
    record = grid_record(
        study, {name: counted(config) for name, (config, _) in composed.items()}, facts[seeds[0]]["world"]
    )
    log.info("study %s: grid, arms and world fixed, digest %s", study.name, digest(record)[:16])
    points = make_points(study, arms, seeds)
    configs = [point_config(composed[point.arm.name], point) for point in points]
    folders = [
        point_folder(folder, point, config, facts[point.seed])
        for point, (config, _) in zip(points, configs, strict=True)
    ]
    done = {i: load for i in range(len(points)) if (load := finished(folders[i])) is not None}
    if done:
        log.info("%d of %d points are finished already and reused", len(done), len(points))
    errors: dict[int, str] = {}
    waiting = [i for i in range(len(points)) if i not in done]
    jobs = [(configs[i][1], folders[i]) for i in waiting]
    for place, result, error in execute(jobs, study.workers, config_dir(cfg), plain_store(cfg)):
        i = waiting[place]
        count = len(done) + len(errors) + 1
        if error is None:
            done[i] = result
            log.info("point %d/%d %s: %s", count, len(points), points[i].label, headline(result))
        else:
            errors[i] = error
            log.error("point %d/%d %s failed: %s", count, len(points), points[i].label, last_line(error))
    if not done:
        raise UserError(
            f"study {study.name}: all {len(points)} points failed; the first with: {next(iter(errors.values()))}"
        )
    return Outcome(
        study,
        arms,
        [(points[i], done[i]) for i in sorted(done)],
        [(points[i], errors[i]) for i in sorted(errors)],
        record,
        folder,
        time.perf_counter() - began,
    )


def plain_store(cfg: DictConfig) -> str | None:
    """The store given in the config, to be handed to every point."""
    return None if cfg.store is None else str(cfg.store)


def numbers_of(cfg: DictConfig) -> dict[str, Any]:
    """The parts of a config that can change a number; paths of model and data give way to what they hold."""
    values = {key: value for key, value in plain(cfg).items() if key not in BOOKKEEPING}
    for node in ("model", "data"):
        values[node] = {key: value for key, value in values[node].items() if key != "path"}
    return values


def counted(cfg: DictConfig) -> dict[str, Any]:
    """``numbers_of`` an arm without the seed, which differs between its points."""
    values = numbers_of(cfg)
    prepare = values["prepare"]
    return {**values, "seed": None, "prepare": None if prepare is None else {**prepare, "seed": None}}


def judge_once(cfg: DictConfig, study: Study, seed: int) -> dict[str, Any]:
    """What identifies one seed's inputs (contents, not paths) and the judge's depth; fills the store on the way.

    The points then find every weight in the store: one judge pass per base and judge, whatever the number of points.
    """
    facts: dict[str, Any] = {"depth": 1, "code": versions(), "weights": [], "world": None}
    ground = None
    for overrides in study.arms.values():
        config = arm_config(cfg, study, [*overrides, f"seed={seed}"])[0]
        if ground is None:
            ground = lay_ground(config)
            facts["world"] = ground.prepared.get("digest")
            facts["model"] = weights_fingerprint(ground.model.path, ground.model.revision)
            facts["chat"] = ground.chat.fingerprint()
            pairs = read_pairs(ground)
            facts["pairs"] = {split: found.fingerprint for split, found in pairs.items()}
            encoded = encode(ground, pairs)
        for node in ("model", "data"):
            config[node].path = ground.cfg[node].path
        weighed = weigh(replace(ground, cfg=config), encoded)
        facts["depth"] = max(facts["depth"], weighed.depth)
        if weighed.key and weighed.key not in facts["weights"]:
            facts["weights"].append(weighed.key)
    return facts


def last_line(text: str) -> str:
    """The last line of an error's text."""
    return text.strip().rpartition("\n")[2] or "no message"


def finished(folder: Path) -> dict[str, Any] | None:
    """The result in a point's folder, or None when there is none."""
    path = folder / RESULT
    if not path.is_file():
        return None
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def headline(result: dict[str, Any]) -> str:
    """The numbers of a point's log line."""
    if result.get("truth"):
        score = result["truth"]["scores"]["validation"]
        return f"validation reward {score['reward']:.3f}, KL {score['kl']:.2f} ({result['seconds']['all']:.0f} s)"
    metrics = result["metrics"]
    return f"val/loss {metrics.get('val/loss', float('nan')):.4f} ({result['seconds']['all']:.0f} s)"


def execute(
    jobs: Sequence[tuple[list[str], Path]], workers: int, config_dir: Path | None, store: str | None
) -> Iterator[tuple[int, dict[str, Any], str | None]]:
    """(place in ``jobs``, result, error) of every job as it finishes, ``workers`` at a time in processes of their own.

    A GPU is not shared: with one, jobs run in this process one after the other.
    """
    import torch

    if not jobs:
        return
    workers = min(workers, len(jobs), max(1, os.cpu_count() or 1))
    if workers == 1 or torch.cuda.is_available():
        for place, (overrides, folder) in enumerate(jobs):
            yield (place, *run_point(overrides, folder, config_dir, store, None))
        return
    threads = max(1, (os.cpu_count() or workers) // workers)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures: dict[Future[tuple[dict[str, Any], str | None]], int] = {
            pool.submit(run_point, overrides, folder, config_dir, store, threads): place
            for place, (overrides, folder) in enumerate(jobs)
        }
        try:
            for future in as_completed(futures):
                try:
                    result, error = future.result()
                except BrokenProcessPool as broken:  # the process was killed, for its memory perhaps
                    result, error = {}, f"the point's process ended abruptly: {broken}"
                yield futures[future], result, error
        except KeyboardInterrupt:  # also a point's own Interrupted
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                worker.terminate()
            raise


def run_point(
    overrides: Sequence[str], folder: Path, config_dir: Path | None, store: str | None, threads: int | None
) -> tuple[dict[str, Any], str | None]:
    """The result of one point, or the text of what went wrong; its log goes to ``log.txt`` in its folder."""
    import traceback

    import torch

    if _ended:
        raise _ended[0]
    if threads is not None:
        torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / "log.txt", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.INFO)
    try:
        cfg = compose("fit", list(overrides), config_dir)
        if store is not None:
            OmegaConf.update(cfg, "store", store)
        OmegaConf.update(cfg, "resume", "auto")  # the folder is named by all that moves a number
        return run(cfg, folder), None
    except KeyboardInterrupt as stop:
        if threads is not None:
            _ended.append(stop)
        raise
    except UserError as error:
        return {}, str(error)
    except Exception:  # noqa: BLE001  one point's failure is reported with the others' results
        (folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        return {}, traceback.format_exc().strip()
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()


# In a worker: the signal that ended its point ends the point that is queued to it already.
_ended: list[KeyboardInterrupt] = []
