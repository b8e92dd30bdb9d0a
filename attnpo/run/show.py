"""Implements ``attnpo.show``, which prints or saves pairs with a value per token, by layer, round and stage."""

import json
import logging
import math
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from attnpo.config.compose import MISSING
from attnpo.data.base import PairSet, parse_row_range
from attnpo.data.collate import TrainingExample, collate
from attnpo.data.prepare import EncodedSet, Tally, encode_pairs, make_example
from attnpo.data.rules import AlignRules
from attnpo.data.weighing import WeightingResult
from attnpo.display.heatmap import heatmap_html
from attnpo.display.pair_record import WeightedResponse
from attnpo.display.token_table import print_pairs
from attnpo.display.weighted_pair import WeightedPair, pair_with_weights
from attnpo.judge.layers import distinct_layers, layers_with_attention
from attnpo.judge.settings import WARN
from attnpo.models.layouts import padded_layout
from attnpo.models.loading import load_model, load_tokenizer
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import ModelSpec
from attnpo.objectives.base import PreferenceObjective
from attnpo.run.combinations import needs_layer_search
from attnpo.run.folders import CONFIG, POLICIES, load_saved_config
from attnpo.run.inputs import make_decoder, read_inputs
from attnpo.run.models import load_base_model
from attnpo.run.resolve import BaseModel, missing_path_keys, resolve
from attnpo.run.run_config import RunConfig
from attnpo.run.show_config import ALL, MEAN, ROUNDS, CommandLinePair, ShowConfig
from attnpo.schema import (
    SIDES,
    EncodedResponse,
    PairWeights,
    PreferencePair,
    TokenStats,
    UserError,
    check_choice,
    list_pair_ids,
)
from attnpo.system.files import check_is_marked_file, write_marked_file
from attnpo.weights.base import OnlineSource, WeightSource
from attnpo.weights.capture import LogpPair, UnreadablePair
from attnpo.weights.pipeline import align_raw_weights, training_weights
from attnpo.weights.sources.attention import Attention
from attnpo.weights.transforms import WeightTransform

log = logging.getLogger(__name__)

MAKER = "attnpo.show"
CAPTURED, SOURCE = "captured", "source"
AT_ONCE = 64  # copies of a pair per call of the objective


class ViewKey(NamedTuple):
    """Selection of weights to show: layer, round (mean, 1, 2) and stage (captured, source, or the last transform)."""

    layer: int | None
    round: str
    stage: str

    def describe(self) -> str:
        """Describes the view in words."""
        layer = [] if self.layer is None else [f"layer {self.layer}"]
        rounds = "mean of the rounds" if self.round == MEAN else f"round {self.round}"
        return ", ".join([*layer, rounds, f"stage {self.stage}"])


@dataclass(frozen=True)
class PairLogps:
    """Log-probabilities of a pair's tokens under policy and reference, each (chosen, rejected), in nats."""

    policy: LogpPair
    reference: LogpPair

    def columns(self, objective: PreferenceObjective, example: TrainingExample) -> list[dict[str, Float[Tensor, " _"]]]:
        """Returns each side's columns: log-probabilities, log-ratio and contribution to the margin."""
        parts = margin_contributions(objective, example, self)
        return [
            {"logp": policy, "reference_logp": reference, "log_ratio": policy - reference, "contribution": part}
            for policy, reference, part in zip(self.policy, self.reference, parts, strict=True)
        ]


def show(cfg: ShowConfig) -> None:
    """Prints the requested pairs, or writes them to a file."""
    file = cfg.out_file()
    if file is not None:
        check_is_marked_file(f"out={file}", file, MAKER)
    if cfg.bad_batch is None:
        pairs = load_weighted_pairs(cfg)
    else:
        pairs = load_bad_pairs(Path(cfg.bad_batch).expanduser(), cfg.ids, cfg.column, cfg.model)
    if cfg.out == "-":
        sys.stdout.writelines(_json_lines(pairs))
    elif file is None:
        print_pairs(pairs, cfg.column, Console())
    else:
        _write_pairs(pairs, file)
        log.info("wrote %d views with %d tokens to %s", len(pairs), sum(len(pair.rows()) for pair in pairs), file)


def _json_lines(pairs: Sequence[WeightedPair]) -> Iterator[str]:
    """Yields a JSON line per token; writes non-finite numbers, which JSON lacks, as strings."""
    for row in (row for pair in pairs for row in pair.rows()):
        plain = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        yield json.dumps(plain, ensure_ascii=False) + "\n"


def _write_pairs(pairs: Sequence[WeightedPair], path: Path) -> None:
    """Writes ``pairs`` in the format of the file extension. Raises UserError rather than replace an unrelated file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content: str | bytes
    if path.suffix == ".html":
        content = heatmap_html(pairs)
    elif path.suffix == ".jsonl":
        content = "".join(_json_lines(pairs))
    else:
        from pandas import DataFrame

        frame = DataFrame([row for pair in pairs for row in pair.rows()])
        content = frame.to_csv(index=False) if path.suffix == ".csv" else frame.to_parquet(None, index=False)
    write_marked_file(f"out={path}", path, content, MAKER)


def load_weighted_pairs(cfg: ShowConfig) -> list[WeightedPair]:
    """Returns the requested pairs in each requested view.

    The pairs are rows of a data set, or the one pair given on the command line. Raises UserError if no pairs are named,
    or if a row does not exist or cannot be weighted or scored.
    """
    typed = None
    if cfg.prompt is not None and cfg.chosen is not None and cfg.rejected is not None:
        typed = CommandLinePair(cfg.prompt, cfg.chosen, cfg.rejected)
    run: RunConfig = cfg if cfg.run is None else load_saved_config(Path(cfg.run), f"run={cfg.run}")
    if (file := cfg.out_file()) is not None:
        run.check_output_paths("out", file)
    if "data.path" in missing_path_keys(run.model, run.data) and run.prepare is None:
        if typed is None:
            raise UserError(
                "nothing to show: set prompt=TEXT chosen=TEXT rejected=TEXT with model.path=MODEL, or "
                "run=FOLDER, or bad_batch=FILE, or data.path=PAIRS with model.path=MODEL; see --help"
            )
        run = run.with_component("data", typed)
    run, base, readers, _ = resolve(
        run.with_value("judge.low_label_mass", WARN)
    )  # showing costs no training, so a bad judge is fine
    source, transforms = run.weights, run.transforms
    if needs_layer_search(source) or any(transform.needs_fit for transform in transforms.values()):
        if isinstance(run.data, CommandLinePair):
            raise UserError(
                "weights.layer=auto and fitted transforms need training pairs: set run=FOLDER, or data.path=PAIRS in "
                "addition to the pair"
            )
        inputs = read_inputs(run, base, readers)
        source = inputs.recipe.source
        transforms = dict(zip(transforms, inputs.weighed.transforms, strict=True))
    if typed is not None:
        pairs: Sequence[PreferencePair] = typed.load("train").pairs
    else:
        pairs = _select_pairs(run.data.load(cfg.split), cfg.split, cfg.rows, cfg.ids)
    if isinstance(source, OnlineSource):
        raise UserError(
            f"weights {type(source).__name__} are computed in every training step, so there are none to show: use "
            "other weights, or show a saved step with bad_batch=FILE"
        )
    encoded = encode_pairs(pairs, base.chat, run.lengths)
    for line in encoded.tally.format_lines():
        log.warning("%s", line)
    weighed = readers.weigh(source, {"train": encoded, "val": EncodedSet([], [], Tally(), 0)}, every_row=True)
    asked = _requested_views(cfg.layers, cfg.rounds, cfg.stages, weighed, transforms)
    viewed: list[tuple[PreferencePair, ViewKey, TrainingExample, PairWeights | None]] = []
    for pair, sides in zip(encoded.pairs, encoded.encoded, strict=True):
        raw = weighed.captured.get(pair.pair_id)
        if isinstance(raw, UnreadablePair):
            log.warning("pair %s cannot be shown: %s", pair.pair_id, raw.story)
            continue
        for view, at_layer in asked:
            rounds = raw if raw is None else _select_round(raw, view.round)
            example = _make_example(view, at_layer, pair, sides, rounds, weighed, transforms, run.align)
            viewed.append((pair, view, example, rounds))
    scores: Mapping[str, PairLogps] = {}
    if cfg.reads_logps:
        if base.spec.reward:
            raise UserError(f"column={cfg.column}: model.reward=true has no log-probs; set column=relative")
        examples = {example.pair_id: example for _, _, example, _ in viewed}
        scores = _score_tokens(base, _policy_folder(cfg.policy, cfg.run, cfg.column), list(examples.values()))
    note = type(weighed.source).__name__.lower()
    traces: dict[str, tuple[str, ...]] = {}
    if "judge" in weighed.source.requires:
        judge = readers.make_judge()
        after = ["the judge's trace"] * (judge.settings.trace is not None)
        after += [] if judge.settings.prefill is None else [repr(judge.settings.prefill)]
        note += f" after {' and '.join(after)}" if after else ""
        traces = {pair.pair_id: judge.load_traces(pair) for pair, *_ in viewed}
    decode, found = make_decoder(base.tokenizer), []
    for pair, view, example, rounds in viewed:
        known = scores.get(pair.pair_id)
        columns = [{}, {}] if known is None else known.columns(run.objective, example)
        made = pair_with_weights(pair, example, decode, rounds, columns)
        words, written = f"{note}, {view.describe()}", traces.get(pair.pair_id, ())
        found.append(replace(made, note=words, view=view._asdict(), traces=written))
    return found


def _requested_views(
    layers: Sequence[int | str],
    rounds: Sequence[int | str],
    stages: Sequence[str],
    weighed: WeightingResult,
    transforms: Mapping[str, WeightTransform],
) -> list[tuple[ViewKey, WeightSource]]:
    """Returns each requested view, with the source set to the view's layer. Raises UserError for a missing view."""
    source, name = weighed.source, type(weighed.source).__name__
    known = [*([CAPTURED] if source.requires else []), SOURCE, *transforms]
    chosen = known if list(stages) == [ALL] else list(stages) or known[-1:]
    for stage in chosen:
        check_choice("stages", stage, known)
    names = [str(one) for one in rounds]
    if names != [MEAN] and "judge" not in source.requires:
        raise UserError(f"rounds=[{','.join(names)}]: {name} uses no judge, so it has no rounds: omit rounds=")
    single = source.layer if isinstance(source, Attention) and not source.layers else None
    sources: list[tuple[int | None, WeightSource]] = [(single if isinstance(single, int) else None, source)]
    if layers:
        if not isinstance(source, Attention):
            raise UserError(f"layers={list(layers)}: {name} does not read a single layer: omit layers=")
        every = list(layers) == [ALL]
        numbers = layers_with_attention(weighed.depth) if every else distinct_layers(layers, weighed.depth, "layers")
        sources = [(number, replace(source, layer=number, layers=())) for number in numbers]
    return [(ViewKey(number, one, stage), at) for (number, at), one, stage in product(sources, names, chosen)]


def _select_round(raw: PairWeights, name: str) -> PairWeights:
    if name == MEAN:
        return raw
    place = ROUNDS.index(name) - 1
    if place >= len(raw.rounds):
        raise UserError(f"rounds=[{name}]: pair {raw.pair_id} has only {len(raw.rounds)} rounds")
    return replace(raw, rounds=raw.rounds[place : place + 1])


def _make_example(
    view: ViewKey,
    source: WeightSource,
    pair: PreferencePair,
    encoded: Mapping[str, EncodedResponse],
    raw: PairWeights | None,
    weighed: WeightingResult,
    transforms: Mapping[str, WeightTransform],
    align: AlignRules,
) -> TrainingExample:
    """Returns the pair with its weights up to the stage of ``view``."""
    names = list(transforms)
    first = names[: names.index(view.stage) + 1] if view.stage in names else []
    made = [transforms[name] for name in first]
    weights = training_weights(source, raw, encoded, align.method, made, layers=weighed.layers, pair=pair)
    if view.stage == CAPTURED and raw is not None:
        bare = align_raw_weights(source, raw, encoded, align.method, layers=weighed.layers)
        weights = replace(weights, chosen=bare["chosen"], rejected=bare["rejected"])
    return make_example(pair.pair_id, encoded, weights)


def _select_pairs(found: PairSet, split: str, rows: str, ids: Sequence[str]) -> Sequence[PreferencePair]:
    """Returns the pairs selected by ``ids`` or ``rows``."""
    if not ids:
        return [found.pairs[row] for row in parse_row_range(rows, len(found), "rows")]
    return [found.pairs[place] for place in _find_ids(list_pair_ids(found.pairs), ids, f"split={split}")]


def _find_ids(known: Sequence[str], ids: Sequence[str], where: str) -> list[int]:
    """Returns the indices of the known ids that start with any of ``ids``. Raises UserError if no id matches."""
    places = [place for place, pair_id in enumerate(known) if pair_id.startswith(tuple(ids))]
    if not places:
        first = ", ".join(pair_id[:8] for pair_id in known[:3])
        raise UserError(
            f"ids={list(ids)}: none of the {len(known)} pairs of {where} has an id that starts with any of these; the "
            f"first ids are {first}"
        )
    return places


def _score_tokens(base: BaseModel, folder: str | None, examples: Sequence[TrainingExample]) -> dict[str, PairLogps]:
    """Returns log-probabilities by pair id under the policy in ``folder`` and under the run's base."""
    reference = base.score(ScoredLM(load_base_model(base)), examples)
    if folder is None:
        log.warning("no policy is set (policy=FOLDER or run=FOLDER), so the reference is shown and log-ratios are 0")
        return {name: PairLogps(one, one) for name, one in reference.items()}
    log.info("policy: %s", folder)
    model = load_model(folder, dtype=base.spec.dtype, attn_implementation=base.spec.attn_implementation)
    policy = base.score(ScoredLM(model), examples)
    return {name: PairLogps(policy[name], reference[name]) for name in policy}


def _policy_folder(policy: str | None, run: str | None, column: str) -> str | None:
    """Returns the policy's folder; None to use the model itself. Raises UserError for a run without a policy."""
    if policy is not None or run is None:
        return policy
    for name in POLICIES:
        folder = Path(run).expanduser() / name
        if (folder / "config.json").is_file():
            return str(folder)
    raise UserError(
        f"run={run}: there is no model in {' or '.join(POLICIES)} (callbacks.checkpoints=false?), but "
        f"column={column} needs a policy: set policy=FOLDER, or column=relative"
    )


# ------------------------------------------------------------------------------------------------ a saved step


def load_bad_pairs(path: Path, ids: Sequence[str], column: str, model: ModelSpec) -> list[WeightedPair]:
    """Returns pairs from the step saved at ``path``: those in ``ids``, else those with a non-finite loss, else all.

    The tokenizer comes from ``model`` if that is set, else from the run. Raises UserError for a different kind of file,
    a column that the step lacks, or a missing tokenizer.
    """
    contents = _load_saved_step(path)
    if column == "contribution":
        raise UserError(
            "column=contribution: a saved step has no per-token rewards: use log_ratio, logp, reference_logp, relative "
            "or weight"
        )
    decode = make_decoder(_load_saved_tokenizer(model, path))
    found = [pair for batches in contents["processes"] for batch in batches for pair in _saved_pairs(batch, decode)]
    known = [pair.pair.pair_id for pair in found]
    chosen = [found[place] for place in _find_ids(known, ids or contents["pairs"] or [""], str(path))]
    if column not in (has := chosen[0].chosen.columns):
        raise UserError(f"column={column}: this step was scored without a reference: use one of {', '.join(has)}")
    return chosen


def _load_saved_step(path: Path) -> dict[str, Any]:
    wanted = "expected a file nonfinite-step-N.pt, which a run saves if a step has non-finite values"
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as problem:
        words = str(problem).partition("\n")[0]
        raise UserError(f"bad_batch={path}: cannot be read ({words}); {wanted}") from problem
    if not isinstance(contents, dict) or not {"processes", "pairs"} <= contents.keys():
        raise UserError(f"bad_batch={path}: {wanted}, got different contents")
    return contents


def _load_saved_tokenizer(model: ModelSpec, path: Path) -> PreTrainedTokenizerBase:
    if model.path == MISSING:
        if not (path.parent / CONFIG).is_file():
            raise UserError(
                f"bad_batch={path}: the file is not in a run folder ({CONFIG} is missing), so there is no tokenizer: "
                "set model.path=FOLDER_OR_HUB_NAME"
            )
        model = load_saved_config(path.parent, f"bad_batch={path}").model
    return load_tokenizer(model.path, model.revision)


def _saved_pairs(saved: Mapping[str, Any], decode: Callable[[int], str]) -> Iterator[WeightedPair]:
    rows = saved["batch"]["groups"]["main"]
    count = len(saved["pair_ids"])
    for place, pair_id in enumerate(saved["pair_ids"]):
        sides = []
        for number in range(len(SIDES)):
            row = number * count + place
            kept = rows["response_mask"][row].bool()
            ids = tuple(rows["response_ids"][row][kept].tolist())
            scores = {"logp": saved["policy"]["logps"][row][kept].float()}
            if saved["reference"] is not None:
                scores["reference_logp"] = saved["reference"]["logps"][row][kept].float()
                scores["log_ratio"] = scores["logp"] - scores["reference_logp"]
            weights = rows["token_weights"]["reward"][row][kept].float()
            scale = 1.0 if rows["factors"] else float(rows["source_lengths"][row])
            sides.append(WeightedResponse("", tuple(map(decode, ids)), ids, (), weights, scale, scores=scores))
        note = f"loss {float(saved['losses'][place]):g} in the saved step"
        yield WeightedPair(PreferencePair(pair_id, (), "", ""), sides[0], sides[1], note=note)


# ------------------------------------------------------------------------------------------------ numbers of tokens


def margin_contributions(objective: PreferenceObjective, example: TrainingExample, scores: PairLogps) -> LogpPair:
    """Returns each token's contribution to the margin.

    This is how much the margin would shrink if the policy gave that token the reference's log-probability. Uses the
    objective's own rewards; if they are linear in the log-ratios, contributions add up to the margin. Raises UserError
    for an objective that needs more than log-probabilities and weights.
    """
    more = sorted(objective.requires - {"reference", "token_weights"})
    if more:
        raise UserError(
            f"column=contribution: objective {type(objective).__name__} also reads {', '.join(more)}, so the margin "
            "cannot be split by token: use another column, or objective=twdpo"
        )
    counts = [len(side.response_ids) for side in example.sides]
    places = [(side, place) for side, count in enumerate(counts) for place in range(count)]
    whole = float(_margins_without_tokens(objective, example, scores, [None])[0])
    chunks = [places[start : start + AT_ONCE] for start in range(0, len(places), AT_ONCE)]
    parts = (
        whole - torch.cat([_margins_without_tokens(objective, example, scores, chunk) for chunk in chunks])
    ).float()
    return parts[: counts[0]], parts[counts[0] :]


def _margins_without_tokens(
    objective: PreferenceObjective,
    example: TrainingExample,
    scores: PairLogps,
    left_out: Sequence[tuple[int, int] | None],
) -> Float[Tensor, " _"]:
    """Returns one margin per entry, with the entry's token (side, index) set to its reference value.

    If an entry is None, no token is changed.
    """
    copies = len(left_out)
    batch = collate([example] * copies, padded_layout, 0, copies)
    shape = batch.main.response_mask.shape
    policy, reference = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for side in range(2):
        rows, count = slice(side * copies, (side + 1) * copies), len(scores.policy[side])
        policy[rows, :count], reference[rows, :count] = scores.policy[side].double(), scores.reference[side].double()
    for copy, token in enumerate(left_out):
        if token is not None:
            side, place = token
            policy[side * copies + copy, place] = reference[side * copies + copy, place]
    read = TokenStats(logps=reference) if "reference" in objective.requires else None
    output = objective(TokenStats(logps=policy), read, batch)
    return (output.chosen_rewards - output.rejected_rewards).double()
