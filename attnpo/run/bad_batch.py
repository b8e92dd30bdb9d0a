"""Pairs of an optimiser step that was not finite, from the file that training keeps of it."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attnpo.config.compose import MISSING
from attnpo.display.pair_record import WeighedResponse
from attnpo.display.weighed_pair import WeighedPair
from attnpo.models.loading import load_tokenizer
from attnpo.models.spec import ModelSpec
from attnpo.run.folders import CONFIG, saved_config
from attnpo.schema import SIDES, PreferencePair, UserError


def bad_pairs(path: Path, ids: Sequence[str], column: str, model: ModelSpec) -> list[WeighedPair]:
    """Returns the pairs of the saved step ``path`` whose loss is not finite (all where none is), or those that ``ids``
    names.

    ``model``: has the tokenizer; without a path the model of the run that left the file. UserError for a file that is
    none of these, for a column that it has not, and where no tokenizer is known.
    """
    contents = _contents(path)
    if column == "contribution":
        raise UserError(
            "column=contribution: a saved step has no rewards by token; take log_ratio, logp, reference_logp, relative "
            "or weight"
        )
    decode = _decoder(model, path)
    found = [pair for batches in contents["processes"] for batch in batches for pair in _pairs(batch, decode)]
    bad = contents["pairs"]
    chosen = [
        pair
        for pair in found
        if (any(pair.pair.pair_id.startswith(start) for start in ids) if ids else not bad or pair.pair.pair_id in bad)
    ]
    if not chosen:
        raise UserError(
            f"ids={list(ids)}: none of the {len(found)} pairs of {path} begins so; the first are "
            f"{', '.join(pair.pair.pair_id for pair in found[:3])}"
        )
    lacking = [pair for pair in chosen if column not in pair.chosen.columns]
    if lacking:
        has = ", ".join(lacking[0].chosen.columns)
        raise UserError(f"column={column}: this step was scored without a reference; it has {has}")
    return chosen


def _contents(path: Path) -> dict[str, Any]:
    wanted = "expected a file nonfinite-step-N.pt, which a run leaves when a step is not finite"
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as problem:
        words = str(problem).partition("\n")[0]
        raise UserError(f"bad_batch={path}: cannot be read ({words}); {wanted}") from problem
    if not isinstance(contents, dict) or not {"processes", "pairs"} <= contents.keys():
        raise UserError(f"bad_batch={path}: {wanted}, got something else")
    return contents


def _decoder(model: ModelSpec, path: Path) -> Callable[[int], str]:
    """Returns the text of a token: by ``model.path``, else by the model of the run that left the file."""
    if model.path == MISSING:
        if not (path.parent / CONFIG).is_file():
            raise UserError(
                f"bad_batch={path}: no run lies beside it ({CONFIG} is missing), so its tokens have no words: give "
                "model.path=FOLDER_OR_HUB_NAME"
            )
        model = saved_config(path.parent, f"bad_batch={path}").model
    tokenizer = load_tokenizer(model.path, model.revision)
    return lambda token: str(tokenizer.decode([token]))


def _pairs(saved: Mapping[str, Any], decode: Callable[[int], str]) -> Iterator[WeighedPair]:
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
            sides.append(WeighedResponse("", tuple(map(decode, ids)), ids, (), weights, scale, scores=scores))
        note = f"loss {float(saved['losses'][place]):g} in the saved step"
        yield WeighedPair(PreferencePair(pair_id, (), "", ""), sides[0], sides[1], note=note)
