"""Judge attention: attention from the verdict position to the tokens of both responses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.judge.base import JudgePrompt, JudgeReading, LoadedJudge, PromptBuilder
from attnpo.judge.layers import HeadRow, StoredRow, distinct_layers, layer_column, layers_with_attention, resolve_layer
from attnpo.schema import BOOKKEEPING, SIDES, JudgeRound, PairWeights, PreferencePair, TokenWeights, UserError
from attnpo.text.chat import RefusedText
from attnpo.weights.base import CapturedSource
from attnpo.weights.capture import prepare_pairs
from attnpo.weights.postprocess import Postprocess

STORE_LAYERS = ("all", "selected")


@dataclass(frozen=True)
class Attention(CapturedSource):
    """Attention from the last prompt token (the one that predicts the verdict).

    ``layer``: 1-based number, "last", or a fraction of the layers with attention. ``layers``: if not empty, these
    layers are averaged instead. Differs from the authors' "mean" sources, which sum the layers and thereby scale beta.
    ``store_layers``: "all" stores every layer with attention, so a layer study needs only one judge pass; "selected"
    stores only the requested ones. ``heads``: the query heads (numbered from 1) to average in each of these layers;
    empty for all heads. If heads are given, the rows of every head are stored in a separate table, so other heads can
    be selected without a new judge pass.
    """

    layer: int | str = "last"
    layers: tuple[int | str, ...] = ()
    postprocess: Postprocess = field(default_factory=Postprocess)
    store_layers: str = field(default="all", metadata=BOOKKEEPING)
    heads: tuple[int, ...] = ()

    requires: ClassVar[frozenset[str]] = frozenset({"judge"})

    def __post_init__(self) -> None:
        if self.store_layers not in STORE_LAYERS:
            expected = " or ".join(STORE_LAYERS)
            raise UserError(f"weights.store_layers: expected {expected}, got {self.store_layers!r}")
        if len(set(self.heads)) < len(self.heads) or any(head < 1 for head in self.heads):
            raise UserError(
                "weights.heads: expected distinct query heads numbered from 1 (or [] for the mean over all heads), got "
                f"{list(self.heads)}"
            )

    def resolve(self, num_layers: int) -> "Attention":
        """Returns the source with ``layer`` and ``layers`` as 1-based numbers; UserError if one is out of range."""
        layers = tuple(distinct_layers(self.layers, num_layers, "weights.layers"))
        return replace(self, layer=resolve_layer(self.layer, num_layers), layers=layers)

    def rows_to_read(self) -> tuple[StoredRow, ...]:
        """Returns the rows to average (layers or selected heads); UserError if the source is not resolved."""
        layers = []
        for layer in self.layers or (self.layer,):
            if isinstance(layer, str):
                raise UserError(f"weights.layer: {layer!r} is not a number yet; call resolve first")
            layers.append(layer)
        if self.heads:
            return tuple(HeadRow(layer, head) for layer in layers for head in self.heads)
        return tuple(layers)

    def layers_to_store(self, num_layers: int) -> tuple[int, ...]:
        """Returns all of the judge's layers with attention, or the requested ones if ``store_layers`` is "selected"."""
        if self.store_layers == "all":
            return layers_with_attention(num_layers)
        means = replace(self, heads=()).resolve(num_layers)
        return tuple(row for row in means.rows_to_read() if isinstance(row, int))

    def rows_to_store(self, num_layers: int, num_heads: Callable[[], int]) -> tuple[StoredRow, ...]:
        """Returns the layers to store, or every head of each if heads are selected.

        UserError if a selected head exceeds the judge's ``num_heads``.
        """
        return self.heads_to_store(num_layers, num_heads()) if self.heads else self.layers_to_store(num_layers)

    def heads_to_store(self, num_layers: int, num_heads: int) -> tuple[HeadRow, ...]:
        """Returns every head of the layers to store; UserError if a selected head exceeds ``num_heads``."""
        outside = [head for head in self.heads if not 1 <= head <= num_heads]
        if outside:
            raise UserError(
                f"weights.heads: expected query heads from 1 to {num_heads} for this judge, got {outside[0]} in "
                f"{list(self.heads)}"
            )
        return tuple(HeadRow(row, head) for row in self.layers_to_store(num_layers) for head in range(1, num_heads + 1))

    def capture_fingerprint(self) -> dict[str, object]:
        """Returns the rows stored at the verdict position: the mean over heads, or every head if some are selected."""
        return {"source": "attention", "position": "last_prompt_token", "heads": "each" if self.heads else "mean"}

    def capture(
        self, pairs: Sequence[PreferencePair], reader: object, layers: tuple[StoredRow, ...]
    ) -> list[PairWeights]:
        """Returns both judge rounds of each pair, as float32 rows of ``layers``, from a single judge call."""
        numbers = tuple(dict.fromkeys(row.layer if isinstance(row, HeadRow) else row for row in layers))
        per_head = any(isinstance(row, HeadRow) for row in layers)
        rows = partial(select_rows, numbers=numbers, wanted=layers)
        return capture_judge_rounds("attention", pairs, reader, rows, numbers, per_head=per_head)

    def select(self, captured: PairWeights, layers: tuple[StoredRow, ...]) -> PairWeights:
        """Reduces ``captured`` to one row: the mean over the selected heads (or all), then over the given layers."""
        absent = [row for row in self.rows_to_read() if row not in layers]
        if absent:
            raise UserError(
                f"weights.layer: {_describe_row(absent[0])} is not among the stored rows "
                f"({', '.join(map(layer_column, layers))}); run attnpo.weigh with weights.store_layers=all"
            )
        # Every layer has the same number of chosen heads, so one mean over all rows is the mean of the layers' means.
        places = [layers.index(row) for row in self.rows_to_read()]
        if len(layers) == 1:
            return captured  # its row is the mean
        return replace(captured, rounds=tuple(_mean_row(item, places) for item in captured.rounds))


def _mean_row(item: JudgeRound, places: Sequence[int]) -> JudgeRound:
    """Reduces a round to one row, the mean of the rows at ``places``."""
    chosen, rejected = (
        TokenWeights(part.token_ids, part.offsets, part.weights[places].mean(dim=0, keepdim=True))
        for part in (item.chosen, item.rejected)
    )
    return replace(item, chosen=chosen, rejected=rejected)


def _describe_row(row: StoredRow) -> str:
    return f"head {row.head} of layer {row.layer}" if isinstance(row, HeadRow) else f"layer {row}"


def select_rows(reading: JudgeReading, numbers: Sequence[int], wanted: Sequence[StoredRow]) -> Tensor:
    """Selects the ``wanted`` rows from the attention of the layers ``numbers``. UserError if a head does not exist."""
    heads = [row for row in wanted if isinstance(row, HeadRow)]
    if not heads:
        return reading.rows
    heads_read = reading.rows.shape[1]
    if max(row.head for row in heads) > heads_read:
        raise UserError(
            f"weights.heads: head {max(row.head for row in heads)} was requested, which the judge's config allows, but "
            f"the judge's attention has {heads_read} heads; choose a different judge, or set weights.heads=[] for the "
            "mean over all heads"
        )
    layers = torch.tensor([numbers.index(row.layer) for row in heads])
    return reading.rows[layers, torch.tensor([row.head - 1 for row in heads])]


# ------------------------------------------------------------------------------------------------ both rounds


def capture_judge_rounds(
    source: str,
    pairs: Sequence[PreferencePair],
    judge: object,
    rows_of: Callable[[JudgeReading], Float[Tensor, "layers T"]],
    layers: Sequence[int],
    *,
    per_head: bool = False,
    rollout: bool = False,
) -> list[PairWeights]:
    """Returns both judge rounds of each pair from a single judge call; ``rows_of`` extracts the rows.

    A pair that cannot be shown to the judge is returned as ``UnreadablePair``. UserError naming ``source`` if there is
    no judge.
    """
    if not isinstance(judge, LoadedJudge):
        raise UserError(f"weights={source} needs a judge: set judge.path and judge.template_file")
    builder = judge.prompts
    shown, refused = prepare_pairs(pairs, lambda pair: _build_prompts(pair, builder))
    prompts = [prompt for both in shown.values() for prompt in both]
    if not prompts:
        return [refused[pair.pair_id] for pair in pairs]
    readings = judge.model.read(
        [prompt.input_ids for prompt in prompts],
        layers=layers,
        per_head=per_head,
        rollout=rollout,
        verdict=judge.verdict,
        label_ids=builder.label_ids if judge.verdict else None,
    )
    cut = (_make_round(prompt, rows_of(reading), reading) for prompt, reading in zip(prompts, readings, strict=True))
    found = {pair_id: PairWeights(pair_id, (next(cut), next(cut))) for pair_id in shown} | refused
    return [found[pair.pair_id] for pair in pairs]


def _build_prompts(pair: PreferencePair, builder: PromptBuilder) -> tuple[JudgePrompt, JudgePrompt]:
    """Builds the prompts of a pair; raises RefusedText, with a generic reason, if it cannot be judged."""
    try:
        rounds = builder.build(pair)
    except UserError as problem:
        story = str(problem).removeprefix(f"pair {pair.pair_id}: ")
        cause = problem if isinstance(problem, RefusedText) else problem.__cause__
        raise RefusedText(cause.reason if isinstance(cause, RefusedText) else story, story) from problem
    bare = [side for side in SIDES for prompt in rounds if prompt.spans[side][0] >= prompt.spans[side][1]]
    if bare:
        story = f"the {bare[0]} response has no token in the judge's prompt"
        raise RefusedText(story, story)
    return rounds


def _make_round(prompt: JudgePrompt, rows: Float[Tensor, "layers T"], reading: JudgeReading) -> JudgeRound:
    """Builds the round of one prompt: the rows restricted to the spans of both responses, and the verdict."""
    sides = {}
    for side in SIDES:
        start, end = prompt.spans[side]
        if not 0 <= start < end <= rows.shape[-1]:
            raise UserError(
                f"pair {prompt.pair_id}, {side}: expected a judge span within {rows.shape[-1]} tokens, got "
                f"[{start}, {end}); raise judge.max_length or drop the pair"
            )
        sides[side] = TokenWeights(
            token_ids=torch.tensor(prompt.input_ids[start:end], dtype=torch.long),
            offsets=torch.tensor(prompt.offsets[side], dtype=torch.long).reshape(-1, 2),
            weights=rows[:, start:end].detach().to("cpu", torch.float32).contiguous(),
        )
    logits = None if reading.verdict_logits is None else reading.verdict_logits.detach().to("cpu", torch.float32)
    token = None if reading.verdict_token is None else int(reading.verdict_token)
    return JudgeRound(prompt.chosen_is_a, sides["chosen"], sides["rejected"], logits, token, prompt.cut, reading.trace)
