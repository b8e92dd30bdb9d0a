"""Executes one run from a config: prepare, train, score, sample, report. Each grid point of a study is one run."""

import json
import logging
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from attnpo.cli.progress import import_phase, phase
from attnpo.config.compose import to_yaml
from attnpo.config.named_files import digest_named_functions
from attnpo.data.arrow_rows import get_pair_ids
from attnpo.data.prompts import ChatPrompt, encode_prompts
from attnpo.models.backbone import freeze
from attnpo.models.generate import context_length, make_chat_generator
from attnpo.models.packed_attention import restore_attention
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import ModelSpec
from attnpo.run.components import Truth
from attnpo.run.folders import POLICIES, make_folder
from attnpo.run.for_page import PAIRS, save_page_examples
from attnpo.run.identity import make_identity
from attnpo.run.input_summary import example_statistics, log_inputs, log_plan, require_budgets, require_examples
from attnpo.run.inputs import Inputs, make_heat_map_pairs, read_inputs, write_training_prompts
from attnpo.run.memory import fit_memory, log_judge_memory, log_training_memory, make_memory_plan, require_device
from attnpo.run.messages import warn_low_learning_rate
from attnpo.run.models import load_base_model
from attnpo.run.resolve import BaseModel, Readers, resolve
from attnpo.run.result import RunResult, TruthScores
from attnpo.run.resume import (
    FAILURES,
    RESULT,
    check_contents,
    copy_to_last,
    digest_contents,
    find_checkpoint,
    find_finished_result,
    finish_replacements,
    prepare_folder,
    require_usable_folder,
    write_config,
    write_result,
)
from attnpo.run.run_config import RunConfig
from attnpo.schema import Json, Message, PreferencePair, Sampling, UserError
from attnpo.system.credentials import identify, mask_credentials
from attnpo.system.files import name_file_in_errors
from attnpo.system.machine import package_versions
from attnpo.system.processes import is_main_process
from attnpo.training.checkpoint_folders import read_checkpoint_info
from attnpo.training.metrics_file import merge_metrics
from attnpo.training.processes import apply_launcher, describe_machine, planned_processes
from attnpo.training.settings import CallbackSettings, check_wandb

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

    from attnpo.run.training import TrainingOutcome

log = logging.getLogger(__name__)


def run(cfg: RunConfig, folder: Path, point: bool = False) -> RunResult | None:
    """Executes the run that a config describes; returns its result, which is also saved as ``result.json``.

    With several processes, only the first writes, scores and returns a result; the others return None. With
    ``resume=auto``, a finished run only returns its saved result, and a run that was killed after its last step is only
    scored. ``point``: true for a grid point of a study, whose folder is repaired if it is damaged. Raises
    RunInterrupted if a signal ended training, and UserError for invalid settings, inputs or checkpoints.
    """
    began = time.perf_counter()
    apply_launcher(cfg.trainer)  # raises UserError before anything is loaded
    leading = is_main_process()  # read before training, because Lightning resets its variables afterwards
    identity = make_identity(cfg)
    before = find_finished_result(folder, identity, point) if cfg.resume == "auto" else None
    if before is not None:
        return before if leading else None
    check_wandb(cfg.logger)
    if cfg.callbacks.extra:  # checked before anything is loaded or read
        from attnpo.training.trainer import make_extra_callbacks

        make_extra_callbacks(cfg.callbacks.extra)
    if cfg.model.lora is not None:
        warn_low_learning_rate(cfg.optimizer.lr)
    resume = find_checkpoint(cfg.resume, folder, identity.numbers, point)
    require_usable_folder(folder, resume)
    if leading:
        make_folder(folder)
    cfg, base, readers, _ = resolve(cfg)
    spec, batch = fit_memory(replace(make_memory_plan(cfg), model=base.spec))
    base = replace(base, spec=spec)
    readers = replace(readers, base=base)
    require_device(cfg.trainer.accelerator)
    log_training_memory(make_memory_plan(cfg), spec, batch, cfg.composed.overrides, cfg.composed.config_dir)
    if "judge" in cfg.weights.requires:
        log_judge_memory(readers.make_judge(), base.device)
    inputs = read_inputs(cfg, base, readers)
    if inputs.layer_choice is not None:
        cfg = cfg.with_value("weights.layer", getattr(inputs.recipe.source, "layer", None))
    numbers, contents = make_identity(cfg).numbers, digest_contents(inputs, base, digest_named_functions(cfg.values))
    if resume is not None:
        check_contents(numbers, contents, resume)
    configuration, machine = to_yaml(cfg.values), describe_machine(cfg.trainer, cfg.seed)
    if leading:
        prepare_folder(folder, resume)
        write_config(folder, configuration, machine)
        if cfg.callbacks.checkpoints:
            write_training_prompts(inputs, folder)
    statistics = example_statistics(inputs)
    log_inputs(inputs, statistics)
    for split, made in inputs.examples.items():
        require_examples(split, made, planned_processes(cfg.trainer))
    require_budgets(inputs.examples, cfg.layout, batch)
    log_plan(inputs.examples["train"], batch, cfg.trainer, cfg.callbacks, base.tokenizer)
    # Importing Lightning takes seconds, so this comes after all checks of the inputs; a finished run skips it.
    with import_phase("loading Lightning"):
        from attnpo.run.report import card_facts
        from attnpo.run.training import train
        from attnpo.training.loggers import open_loggers

    account = {"config": identify(numbers), "contents": contents}
    facts = card_facts(cfg, base.spec, inputs, statistics) if cfg.callbacks.checkpoints and leading else None
    with open_loggers(cfg.logger, folder, cfg.values) as loggers:
        trained = train(cfg, base, batch, inputs, account, facts, folder, loggers, resume)
        if not leading:
            return None
        result = _finish_run(cfg, base, readers, inputs, statistics, trained, folder, loggers, began, resume, point)
    write_config(folder, configuration, machine)  # again, so that the sealed config is the one that ran
    write_result(folder / f"{RESULT}.part")
    return result


def _finish_run(
    cfg: RunConfig,
    base: BaseModel,
    readers: Readers,
    inputs: Inputs,
    statistics: dict[str, Json],
    trained: "TrainingOutcome",
    folder: Path,
    loggers: list["Logger"],
    began: float,
    resume: Path | None,
    point: bool,
) -> RunResult:
    """Scores a trained policy, samples from it and writes reports.

    Logs and skips any of these steps that fails, except scoring a grid point.
    """
    from attnpo.run.report import log_run_to_wandb, write_run_report

    callbacks, policy, chat = cfg.callbacks, trained.policy, base.chat
    with tolerate_failure(folder, "cleaning up the run's folder"):
        merge_metrics(folder)
        finish_replacements(folder)
        if callbacks.checkpoints:
            copy_to_last(folder, resume)
    with tolerate_failure(folder, "moving the policy back to its device"):
        policy.to(base.device)  # a sharded policy was gathered on the CPU
        restore_attention(policy.model)  # scoring and sampling use the usual attention
    truth, sampled, drift = None, list[PreferencePair](), dict[str, Json]()
    with nullcontext() if point else tolerate_failure(folder, "scoring by the true reward"):
        truth, sampled = score_by_true_reward(cfg.truth, base, policy)
    with tolerate_failure(folder, "measuring where the policy moved", UserError if point else Exception):
        if cfg.drift is not None:
            drift = cfg.drift.measure(policy, inputs, readers, cfg.objective, cfg.reference, cfg.truth, sampled)
    if callbacks.samples:
        with tolerate_failure(folder, "sampling answers"):
            write_samples(
                base,
                policy.model,
                validation_pairs(inputs),
                callbacks,
                folder / "generations.jsonl",
                max_length=cfg.lengths.max_length,
                seed=cfg.seed,
            )
    seconds = {"train": round(trained.seconds, 2), "all": round(time.perf_counter() - began, 2)}
    result = RunResult(
        cfg.seed,
        trained.steps,
        seconds,
        trained.metrics,
        statistics,
        package_versions(),
        truth,
        drift,
        read_merge_errors(folder),
    )
    if result.training_warning is not None:
        log.warning("warning: %s", result.training_warning)
    (folder / f"{RESULT}.part").write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    if point:
        with tolerate_failure(folder, "saving examples for the study's page"):
            save_page_examples(folder, make_heat_map_pairs(inputs, chat.tokenizer, PAIRS), sampled)
    if callbacks.report:
        with tolerate_failure(folder, "writing the report"):
            shown = inputs.examples["train"].examples[: 0 if base.spec.reward else callbacks.heat_maps]
            with phase("log-probabilities of the first pairs"):
                first = base.score(policy, shown)
            write_run_report(inputs, result, chat, callbacks, to_yaml(cfg.values), folder, first)
    with tolerate_failure(folder, "sending results to the loggers"):
        log_run_to_wandb(loggers, inputs, result, chat.tokenizer, callbacks, folder)
    return result


def read_merge_errors(folder: Path) -> dict[str, Json]:
    """Reads the rounding errors from merging adapters into ``best/`` and ``last/``; empty without adapters."""
    found: dict[str, Json] = {
        name: account["merge"] for name in POLICIES if "merge" in (account := read_checkpoint_info(folder / name))
    }
    numbers = "the policy as it was trained, its adapters beside their base"
    return {"numbers_of": numbers, **found} if found else {}


@contextmanager
def tolerate_failure(folder: Path, what: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Logs errors of type ``kind`` raised during ``what`` and continues; appends tracebacks to ``failures.txt``."""
    try:
        yield
    except kind as problem:
        words, place = " ".join(str(problem).split()), ""
        if not isinstance(problem, UserError):
            words = f"{type(problem).__name__}: {words}"
            with suppress(OSError), (folder / FAILURES).open("a", encoding="utf-8") as file:
                file.write(f"{what}\n{mask_credentials(traceback.format_exc())}\n")
                place = f"; traceback in {folder / FAILURES}"
        log.warning("warning: %s failed after training and is missing from the result: %s%s", what, words, place)


@phase("scoring answers to held-out prompts")
def score_by_true_reward(
    scorer: Truth | None, start: BaseModel, policy: ScoredLM
) -> tuple[dict[str, TruthScores] | None, list[PreferencePair]]:
    """Scores the policy by the true reward on validation and test prompts; also returns the test answers as pairs.

    In each pair, the policy's answer is the chosen response and the base model's answer is the rejected one. If there
    is no true reward, returns None and an empty list.
    """
    if scorer is None:
        return None, []
    model = freeze(policy.model)
    base, tokenizer = freeze(load_base_model(start)), start.tokenizer
    scores: dict[str, TruthScores] = {}
    sampled: list[PreferencePair] = []
    for split in ("validation", "test"):
        key = (replace(start.spec, lora=None, compile=None), scorer, split)
        if key not in _base_answers:
            _base_answers[key] = scorer.base_answers(base, tokenizer, split=split)
        rivals = _base_answers[key]
        score = scorer.score(model, base, tokenizer, split=split, base_answers=rivals)
        rewards, of_base = (every.mean(axis=1).round(6).tolist() for every in (score.rewards, score.base_rewards))
        scores[split] = TruthScores(score.scalars(), rewards, of_base)
        firsts = slice(None, None, score.rewards.shape[1])  # first answer to each prompt
        sampled = [
            PreferencePair.from_texts([Message(role="user", content=prompt)], answer, rival)
            for prompt, answer, rival in zip(
                score.prompts[firsts], score.answers[firsts], rivals.texts[firsts], strict=True
            )
        ]
    log.info(
        "true reward on held-out prompts: %.3f (base %.3f), win rate %.3f, KL %.2f",
        *(scores["test"].numbers[name] for name in ("reward", "base_reward", "win_rate", "kl")),
    )
    return scores, sampled


# The base's answers are the same at every point of a study, so they are sampled once per process.
_base_answers: dict[tuple[ModelSpec, Any, str], Any] = {}


def validation_pairs(inputs: Inputs) -> list[PreferencePair]:
    """Returns the validation pairs that the policy is evaluated on."""
    kept = set(get_pair_ids(inputs.examples["val"].examples))
    return [pair for pair in inputs.pairs["val"].pairs if pair.pair_id in kept]


@phase("sampling answers")
def write_samples(
    base: BaseModel,
    policy: PreTrainedModel,
    pairs: Sequence[PreferencePair],
    settings: CallbackSettings,
    path: Path,
    *,
    max_length: int,
    seed: int,
) -> None:
    """Writes responses of policy and reference to the first ``settings.samples`` prompts that leave room for them."""
    limit = min(max_length, context_length(policy.config) or max_length)
    encoded = encode_prompts(
        [ChatPrompt(pair.pair_id, pair.prompt) for pair in pairs], base.chat, settings.sample_tokens, limit
    )
    pairs = [pair for pair in pairs if pair.pair_id in encoded.kept][: settings.samples]
    if not pairs:
        log.info(
            "no responses were sampled, because no validation prompt leaves room for %d tokens", settings.sample_tokens
        )
        return
    sampling = Sampling(max_new_tokens=settings.sample_tokens, seed=seed)
    reference = load_base_model(base)
    reference.to(policy.device)  # type: ignore[arg-type]
    answers = {
        name: make_chat_generator(model, base.chat).generate([pair.prompt for pair in pairs], sampling)
        for name, model in (("policy", policy), ("reference", reference))
    }
    with name_file_in_errors(path), path.open("w", encoding="utf-8") as file:
        for i, pair in enumerate(pairs):
            row = {"prompt": list(pair.prompt), **{name: texts[i] for name, texts in answers.items()}}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    log.info("wrote %d sample responses to %s", len(pairs), path)
