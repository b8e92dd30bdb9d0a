"""``attnpo.pair``: the answers to each prompt scored, and pairs of a better and a worse one; repeated, it goes on.

Beside ``pairs.jsonl`` lie ``pairs.json`` (what made them, and what became of every prompt), ``pairs.scores.jsonl`` with
a score per answer, which a repeated command continues, and the judge's replies in ``grades``.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from attnpo.evaluation.jsonl_store import DIGEST, KEY, SUFFIX, JsonlStore, read_account
from attnpo.evaluation.pairing.answer_sets import AnswerSets
from attnpo.evaluation.pairing.base import AnswerSet, ScoreRow
from attnpo.evaluation.pairing.pair_config import PairConfig, PairRules, Take
from attnpo.schema import Message, UserError, digest
from attnpo.system.credentials import identify
from attnpo.system.files import differences, file_digest, require_own, write_whole
from attnpo.system.locks import locked
from attnpo.system.machine import device_of, versions
from attnpo.system.processes import process

log = logging.getLogger(__name__)

TIES = "ties"
NARROW = "pairs with a gap below pairs.min_gap"
UNPAIRED = "prompts without a pair, since their scores are equal or too near"
UNRANKED = "prompts left unranked"


def make_pairs(cfg: PairConfig) -> Path | None:
    """Makes the file of pairs that a config asks for; None after a dry run, or while scores are missing.

    In a job of several processes each scores its share of the prompts; the last one writes the pairs.

    Raises:
        UserError: answers or ranker cannot be read, what lies at ``output`` is of other answers or another ranker, was
            changed or is no file of this command, another job works there, or no pair can be made.
    """
    path = cfg.path()
    if path.suffix != SUFFIX:
        raise UserError(f"output={path}: expected a file name that ends in {SUFFIX}")
    account = path.with_suffix(".json")
    written = [str(read_account(account)[DIGEST])] if DIGEST in read_account(account) else []
    require_own(f"output={path}", path, account, written, "attnpo.pair")
    file = JsonlStore[ScoreRow](path.with_name(f"{path.stem}.scores{SUFFIX}"), "scores", *process())
    cfg.require_unread("output", path, account, file.path, file.sidecar)
    with locked(path.parent, file=file.part.name, instead="output=FILE.jsonl"):
        found, ranker = cfg.answers.load(), cfg.ranker
        key = {"answers": found.fingerprint, "ranker": ranker.key(found.sets)}
        # A dry run leaves no account of its ranker, which would bind the commands after it.
        have = {} if cfg.dry_run and not file.sidecar.is_file() else file.open(key)
        wanted = [(one.id, answer.draw) for one in found.sets for answer in one.answers]
        share = found.sets[file.rank :: file.processes]
        lacking = [one for one in share if any((one.id, answer.draw) not in have for answer in one.answers)]
        log.info("%d prompts to rank by %s, %d of them here", len(found.sets), ranker.name, len(lacking))
        done = 0
        if lacking:
            for some in ranker.scores(lacking, device_of(cfg.trainer.get("accelerator", "auto")), path.parent):
                if not cfg.dry_run:
                    file.append([row for row in some if (row["id"], row["draw"]) not in have])
                done += len({row["id"] for row in some})
        if cfg.dry_run:
            return None
        rows = file.merge(wanted)
        if rows is not None:
            file.account(key, {"scores": len(rows)})
            return _write(path, found, key, rows, cfg.pairs, ranker.name)
        if done < len(lacking):
            log.warning(
                "%d of %d prompts have no score yet: give the command again to ask for them once more",
                *(len(lacking) - done, len(lacking)),
            )
        else:
            log.info("this process's share is done; the last process to finish writes %s", path)
        return None


def _write(
    path: Path,
    found: AnswerSets,
    key: Mapping[str, object],
    rows: Sequence[ScoreRow],
    rules: PairRules,
    ranker: str,
) -> Path:
    """Writes the pairs and their account. UserError when there is none."""
    scores: dict[str, dict[int, ScoreRow]] = {}
    for row in rows:
        scores.setdefault(row["id"], {})[row["draw"]] = row
    counts: Counter[str] = Counter(found.counts)
    pairs = [pair for one in found.sets for pair in pairs_of(one, scores[one.id], rules, ranker, counts)]
    told = "; ".join(f"{what}: {count}" for what, count in counts.items() if count)
    if not pairs:
        raise UserError(f"no pair can be made of the answers to {len(found.sets)} prompts: {told}")
    whole = json.loads(json.dumps({**identify(key), "pairs": asdict(rules) | {"take": rules.take.value}}))
    before = read_account(path.with_suffix(".json")).get(KEY)
    if isinstance(before, Mapping):
        for name, was, now in differences(identify(before), whole):
            log.warning("%s stands on %s %s, this command has %s: it is made anew", path, name, was, now)
    write_whole(path, "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs))
    facts = {
        KEY: whole,
        DIGEST: file_digest(path),
        "ranker": ranker,
        "answers": {"path": found.path, "rows": found.read, "prompts": found.prompts, "made_by": found.origin},
        "prompts": {"ranked": len(found.sets) - counts[UNRANKED], "paired": len({pair["id"] for pair in pairs})},
        "pairs": len(pairs),
        "counts": {what: count for what, count in sorted(counts.items()) if count},
        "versions": versions(),
    }
    write_whole(path.with_suffix(".json"), json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    log.info("%d pairs of %d prompts in %s, ranked by %s; %s", len(pairs), found.prompts, path, ranker, told)
    return path


def pairs_of(
    found: AnswerSet, scores: Mapping[int, ScoreRow], rules: PairRules, ranker: str, counts: Counter[str]
) -> list[dict[str, object]]:
    """Returns the rows of a prompt's pairs, in the format that ``data.path`` reads, widest gap first; adds to
    ``counts``.
    """
    reasons = [row.get("reason", "") for row in scores.values() if row["score"] is None]
    if reasons:
        counts[UNRANKED] += 1
        counts[f"{UNRANKED}, {reasons[0]}"] += 1
        return []
    value = {draw: row["score"] or 0.0 for draw, row in scores.items()}
    # Of equal scores the order is drawn by a digest, so that no place among the draws is preferred.
    order = sorted(found.answers, key=lambda one: (-value[one.draw], digest([found.id, one.draw])))
    couples = {
        Take.BEST_WORST: [(order[0], order[-1])],
        Take.BEST_REST: [(order[0], other) for other in reversed(order[1:])],
        Take.ALL: [(one, other) for place, one in enumerate(order) for other in order[place + 1 :]],
    }[rules.take]
    made = []
    for better, worse in sorted(couples, key=lambda two: value[two[1].draw] - value[two[0].draw]):
        gap = value[better.draw] - value[worse.draw]
        if gap == 0:
            counts[TIES] += 1
        elif gap < rules.min_gap:
            counts[NARROW] += 1
        else:
            made.append(
                {
                    "prompt": list(found.prompt),
                    "chosen": [Message(role="assistant", content=better.text)],
                    "rejected": [Message(role="assistant", content=worse.text)],
                    "id": found.id,
                    "ranker": ranker,
                    "chosen_score": value[better.draw],
                    "rejected_score": value[worse.draw],
                    "chosen_draw": better.draw,
                    "rejected_draw": worse.draw,
                }
            )
    counts[UNPAIRED] += not made
    return made
