"""Runs a study: every base judged once, points run (two at a time on a laptop), finished ones reused, all collected."""

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnpo.config import build, check, compose, plain
from attnpo.schema import UserError, digest
from attnpo.studies.grid import Arm, Point, Study, expand_arms, grid_record, make_points
from attnpo.studies.inputs import encode, lay_ground, read_pairs, weigh, world_size
from attnpo.studies.judging import JudgeRoom
from attnpo.studies.run import RESULT, run

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


def point_config(cfg: DictConfig, study: Study, point: Point) -> tuple[DictConfig, list[str]]:
    """A point's own composed config, and the overrides that give it on the command line."""
    user = list(cfg.composed.get("overrides", []))
    overrides = layered(study.shared, user, point.overrides(()))
    return compose("fit", overrides, config_dir(cfg)), overrides


def config_dir(cfg: DictConfig) -> Path | None:
    """The user's own config folder this config was composed with, if any."""
    given = cfg.composed.get("config_dir")
    return None if given is None else Path(given)


def point_folder(folder: Path, point: Point, cfg: DictConfig) -> Path:
    """Where a point's results lie: named by arm, grid values and seed, and by the digest of everything that counts."""
    values = {key: value for key, value in plain(cfg).items() if key not in BOOKKEEPING}
    name = "-".join(part for part in (point.arm.name, *(value.split(".")[-1] for value in point.values)) if part)
    clean = "".join(letter if letter.isalnum() or letter in "=.-" else "_" for letter in name)
    return folder / "points" / f"{clean}-seed{point.seed}-{digest(values)[:8]}"


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
    began = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    seeds = [cfg.seed + i for i in range(cfg.seeds if cfg.seeds is not None else study.seeds)]
    world = judge_once(cfg, study, seeds)
    arms = expand_arms(study, world.pop("num_layers"))
    record = grid_record(study, arms, world)
    log.info("study %s: grid, arms and world fixed, digest %s", study.name, digest(record)[:16])
    points = make_points(study, arms, seeds)
    configs = [point_config(cfg, study, point) for point in points]
    for config, _ in configs[: len(arms)]:
        check(config, complete=False)
    folders = [point_folder(folder, point, config) for point, (config, _) in zip(points, configs, strict=True)]
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
            log.error("point %d/%d %s failed: %s", count, len(points), points[i].label, error.splitlines()[-1])
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


def judge_once(cfg: DictConfig, study: Study, seeds: Sequence[int]) -> dict[str, Any]:
    """What identifies the study's world, and the judge's depth; fills the store for every seed on the way.

    The points then find every weight in the store: one judge pass per base, whatever the number of points.
    """
    world: dict[str, Any] = {"num_layers": 1}
    needing = [overrides for overrides in study.arms.values() if needs_judge(cfg, overrides)]
    bases = []
    for seed in seeds:
        for overrides in needing[:1] or [list(study.arms[study.control])]:
            user = list(cfg.composed.get("overrides", []))
            changed = layered(study.shared, user, overrides, [f"seed={seed}", "study=none", "seeds=null"])
            config = compose("fit", changed, config_dir(cfg))
            ground = lay_ground(config)
            if "digest" in ground.prepared:
                world["world"] = ground.prepared["digest"]
            bases.append(ground.prepared.get("base_key", ground.model.path))
            if needing:
                world["num_layers"] = JudgeRoom(build(ground.cfg.judge), ground.model, ground.chat).num_layers
                weigh(ground, encode(ground, read_pairs(ground)))
    return {**world, "bases": bases}


def needs_judge(cfg: DictConfig, overrides: Sequence[str]) -> bool:
    """Whether an arm's weight source reads a judge."""
    user = list(cfg.composed.get("overrides", []))
    config = compose("fit", layered(user, overrides, ["study=none", "seeds=null"]), config_dir(cfg))
    return "judge" in build(config.weights).requires


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
                result, error = future.result()
                yield futures[future], result, error
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_point(
    overrides: Sequence[str], folder: Path, config_dir: Path | None, store: str | None, threads: int | None
) -> tuple[dict[str, Any], str | None]:
    """The result of one point, or the text of what went wrong; its log goes to ``log.txt`` in its folder."""
    import traceback

    import torch

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
        return run(cfg, folder), None
    except UserError as error:
        return {}, str(error)
    except Exception:  # noqa: BLE001  one point's failure is reported with the others' results
        (folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        return {}, traceback.format_exc().strip()
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()
