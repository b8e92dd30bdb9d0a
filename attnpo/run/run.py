"""One run from a composed config: prepare, train, score, sample, report. Every point of a study is one of these."""

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
from attnpo.data.prompts import AnswerPrompt, encode_prompts
from attnpo.models.backbone import freeze
from attnpo.models.generate import context_length, make_chat_generator
from attnpo.models.packed_attention import restore_attention
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import ModelSpec
from attnpo.run.components import Truth
from attnpo.run.folders import POLICIES, make_folder
from attnpo.run.for_page import PAIRS, keep_for_page
from attnpo.run.identity import identity_of
from attnpo.run.input_summary import example_statistics, log_inputs, log_plan, require_budgets, require_examples
from attnpo.run.inputs import Inputs, heat_rows, read_inputs, write_training_prompts
from attnpo.run.memory import fit_memory, footprint, log_judge, log_training, require_device
from attnpo.run.messages import warn_low_rate
from attnpo.run.models import load_start
from attnpo.run.resolve import BaseModel, Readers, resolve
from attnpo.run.result import RunResult, TruthScores
from attnpo.run.resume import (
    FAILURES,
    RESULT,
    check_contents,
    check_folder,
    contents_of,
    find_finished_result,
    find_resume,
    keep_last,
    prepare_folder,
    tidy_checkpoints,
    write_config,
    write_result,
)
from attnpo.run.run_config import RunConfig
from attnpo.schema import Json, Message, PreferencePair, Sampling, UserError
from attnpo.system.credentials import identify, mask_credentials
from attnpo.system.files import name_file_in_errors
from attnpo.system.machine import package_versions
from attnpo.system.processes import is_main_process
from attnpo.training.checkpoint_folders import read_account
from attnpo.training.metrics_file import merge_metrics
from attnpo.training.processes import as_launched, machine_line, planned_processes
from attnpo.training.settings import CallbackSettings, check_tracker

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

    from attnpo.run.training import Trained

log = logging.getLogger(__name__)


def run(cfg: RunConfig, folder: Path, point: bool = False) -> RunResult | None:
    """Returns the result of one run, also written to ``result.json`` in its folder.

    Of several processes the first one writes and scores; the others get None. ``resume`` auto gives the result of a
    finished run, and scores one that was killed after its last step. ``point``: a study's, which mends what is damaged.
    Raises Interrupted where a signal ended the training, and UserError for settings, inputs or a state that cannot be.
    """
    began = time.perf_counter()
    as_launched(cfg.trainer)  # refuses before anything is loaded
    leading = is_main_process()  # before training: Lightning takes its variables back afterwards
    identity = identity_of(cfg)
    before = find_finished_result(folder, identity, point) if cfg.resume == "auto" else None
    if before is not None:
        return before if leading else None
    check_tracker(cfg.logger)
    if cfg.callbacks.extra:  # refused before anything is loaded or read
        from attnpo.training.trainer import make_extra

        make_extra(cfg.callbacks.extra)
    if cfg.model.lora is not None:
        warn_low_rate(cfg.optimizer.lr)
    resume = find_resume(cfg.resume, folder, identity.numbers, point)
    check_folder(folder, resume)
    if leading:
        make_folder(folder)
    cfg, base, readers, _ = resolve(cfg)
    spec, batch = fit_memory(replace(footprint(cfg), model=base.spec))
    base = replace(base, spec=spec)
    readers = replace(readers, base=base)
    require_device(cfg.trainer.accelerator)
    log_training(footprint(cfg), spec, batch, cfg.composed.overrides, cfg.composed.config_dir)
    if "judge" in cfg.weights.requires:
        log_judge(readers.make_judge(), base.device)
    inputs = read_inputs(cfg, base, readers)
    if inputs.layer_choice is not None:
        cfg = cfg.with_value("weights.layer", getattr(inputs.recipe.source, "layer", None))
    numbers, contents = identity_of(cfg).numbers, contents_of(inputs, base, digest_named_functions(cfg.values))
    if resume is not None:
        check_contents(numbers, contents, resume)
    configuration, machine = to_yaml(cfg.values), machine_line(cfg.trainer, cfg.seed)
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
    # Lightning takes seconds: what inputs can be refused for is said before, and a finished run does without.
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
        result = _finish(cfg, base, readers, inputs, statistics, trained, folder, loggers, began, resume, point)
    write_config(folder, configuration, machine)  # once more, so that what is sealed is what ran
    write_result(folder / f"{RESULT}.part")
    return result


def _finish(
    cfg: RunConfig,
    base: BaseModel,
    readers: Readers,
    inputs: Inputs,
    statistics: dict[str, Json],
    trained: "Trained",
    folder: Path,
    loggers: list["Logger"],
    began: float,
    resume: Path | None,
    point: bool,
) -> RunResult:
    """Scores, samples and reports a trained policy; what fails is named and left out, but of a ``point`` its scores."""
    from attnpo.run.report import publish_run, write_run_report

    callbacks, policy, chat = cfg.callbacks, trained.policy, base.chat
    with spare(folder, "tidying the run's folder"):
        merge_metrics(folder)
        tidy_checkpoints(folder)
        if callbacks.checkpoints:
            keep_last(folder, resume)
    with spare(folder, "moving the policy back to its device"):
        policy.to(base.device)  # one that was sharded was put together on the CPU
        restore_attention(policy.model)  # what is scored and sampled runs as any other model
    truth, sampled, drift = None, list[PreferencePair](), dict[str, Json]()
    with nullcontext() if point else spare(folder, "scoring by the truth"):
        truth, sampled = score_truth(cfg.truth, base, policy)
    with spare(folder, "measuring where the policy moved", UserError if point else Exception):
        if cfg.drift is not None:
            drift = cfg.drift.measure(policy, inputs, readers, cfg.objective, cfg.reference, cfg.truth, sampled)
    if callbacks.samples:
        with spare(folder, "sampling answers"):
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
        merges_of(folder),
    )
    if result.training_warning is not None:
        log.warning("warning: %s", result.training_warning)
    (folder / f"{RESULT}.part").write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    if point:
        with spare(folder, "keeping examples for the study's page"):
            keep_for_page(folder, heat_rows(inputs, chat.tokenizer, PAIRS), sampled)
    if callbacks.report:
        with spare(folder, "the report"):
            shown = inputs.examples["train"].examples[: 0 if base.spec.reward else callbacks.heat_maps]
            with phase("log-probabilities of the first pairs"):
                first = base.score(policy, shown)
            write_run_report(inputs, result, chat, callbacks, to_yaml(cfg.values), folder, first)
    with spare(folder, "handing the run to its loggers"):
        publish_run(loggers, inputs, result, chat.tokenizer, callbacks, folder)
    return result


def merges_of(folder: Path) -> dict[str, Json]:
    """Returns what merging adapters into ``best/`` and ``last/`` took, for ``result.json``; empty without adapters."""
    found: dict[str, Json] = {
        name: account["merge"] for name in POLICIES if "merge" in (account := read_account(folder / name))
    }
    numbers = "the policy as it was trained, its adapters beside their base"
    return {"numbers_of": numbers, **found} if found else {}


@contextmanager
def spare(folder: Path, what: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Logs an error of that kind raised while making ``what`` and goes on; ``failures.txt`` gets its traceback."""
    try:
        yield
    except kind as problem:
        words, place = " ".join(str(problem).split()), ""
        if not isinstance(problem, UserError):
            words = f"{type(problem).__name__}: {words}"
            with suppress(OSError), (folder / FAILURES).open("a", encoding="utf-8") as file:
                file.write(f"{what}\n{mask_credentials(traceback.format_exc())}\n")
                place = f"; traceback in {folder / FAILURES}"
        log.warning("warning: %s failed after the last step and is left out of the result: %s%s", what, words, place)


@phase("answers to held-out prompts, scored by the truth")
def score_truth(
    scorer: Truth | None, start: BaseModel, policy: ScoredLM
) -> tuple[dict[str, TruthScores] | None, list[PreferencePair]]:
    """Returns scores against a known truth on validation and test prompts, and the answers to the test prompts.

    Answers: the policy's as chosen, the start's as rejected. None and no answers in settings without a truth.
    """
    if scorer is None:
        return None, []
    model = freeze(policy.model)
    base, tokenizer = freeze(load_start(start)), start.tokenizer
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
        sampled = [
            PreferencePair.from_texts([Message(role="user", content=prompt)], answer, rival)
            for prompt, answer, rival in zip(score.prompts, score.answers, rivals.texts, strict=True)
        ]
    log.info(
        "truth, held-out prompts: reward %.3f (base %.3f), win rate %.3f, KL %.2f",
        *(scores["test"].numbers[name] for name in ("reward", "base_reward", "win_rate", "kl")),
    )
    return scores, sampled


# The base answers the same prompts alike at every point of a study: sampled once per process.
_base_answers: dict[tuple[ModelSpec, Any, str], Any] = {}


def validation_pairs(inputs: Inputs) -> list[PreferencePair]:
    """Returns the validation pairs that the policy is measured on."""
    kept = set(get_pair_ids(inputs.examples["val"].examples))
    return [pair for pair in inputs.pairs["val"].pairs if pair.pair_id in kept]


@phase("sample answers")
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
    """Answers prompts of the first ``settings.samples`` pairs that leave room with both models, a JSON line each."""
    limit = min(max_length, context_length(policy.config) or max_length)
    encoded = encode_prompts(
        [AnswerPrompt(pair.pair_id, pair.prompt) for pair in pairs], base.chat, settings.sample_tokens, limit
    )
    pairs = [pair for pair in pairs if pair.pair_id in encoded.kept][: settings.samples]
    if not pairs:
        log.info("no validation prompt leaves room for %d sample tokens", settings.sample_tokens)
        return
    sampling = Sampling(max_new_tokens=settings.sample_tokens, seed=seed)
    reference = load_start(base)
    reference.to(policy.device)  # type: ignore[arg-type]
    answers = {
        name: make_chat_generator(model, base.chat).generate([pair.prompt for pair in pairs], sampling)
        for name, model in (("policy", policy), ("reference", reference))
    }
    with name_file_in_errors(path), path.open("w", encoding="utf-8") as file:
        for i, pair in enumerate(pairs):
            row = {"prompt": list(pair.prompt), **{name: texts[i] for name, texts in answers.items()}}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    log.info("%d sample answers in %s", len(pairs), path)
