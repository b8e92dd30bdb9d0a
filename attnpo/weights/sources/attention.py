"""Judge attention: the row of the verdict position on the tokens of both responses."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from attnpo.schema import Kind, PairWeights, PreferencePair, TokenWeights, UserError
from attnpo.weights.base import Tools, resolve_layer
from attnpo.weights.postprocess import Postprocess
from attnpo.weights.sources.spans import cut_round

STORE_LAYERS = ("all", "selected")


@dataclass(frozen=True)
class Attention:
    """Attention of the last prompt token (the one that predicts the verdict), mean over query heads.

    ``layer``: 1-based number, "last", or a fraction of the depth. ``layers``: when not empty, the mean of these
    layers instead (Differs from the authors' "mean" sources: they add the layers up, which scales beta).
    ``store_layers``: "all" stores every layer, so that a layer study needs one judge pass; "selected" only the
    wanted ones.
    """

    layer: int | str = "last"
    layers: tuple[int, ...] = ()
    postprocess: Postprocess = field(default_factory=Postprocess)
    store_layers: str = "all"

    kind: ClassVar[Kind] = Kind.DISTRIBUTION
    signed: ClassVar[bool] = False
    tokens: ClassVar[str] = "source"
    requires: ClassVar[frozenset[str]] = frozenset({"judge"})

    def __post_init__(self) -> None:
        if self.store_layers not in STORE_LAYERS:
            expected = " or ".join(STORE_LAYERS)
            raise UserError(f"weights.store_layers: expected {expected}, got {self.store_layers!r}")

    def resolve(self, num_layers: int) -> "Attention":
        """The same source with ``layer`` and ``layers`` as numbers from 1 to ``num_layers``, or a UserError."""
        layers = tuple(sorted({resolve_layer(layer, num_layers) for layer in self.layers}))
        return replace(self, layer=resolve_layer(self.layer, num_layers), layers=layers)

    def wanted(self) -> tuple[int, ...]:
        """The resolved layers whose mean is the row; UserError before ``resolve``."""
        if isinstance(self.layer, str):
            raise UserError(f"weights.layer: {self.layer!r} is not yet a number; resolve it against the judge first")
        return self.layers or (self.layer,)

    def capture_layers(self, num_layers: int) -> tuple[int, ...]:
        """All layers of the judge, or only the wanted ones under ``store_layers: selected``."""
        if self.store_layers == "all":
            return tuple(range(1, num_layers + 1))
        return self.resolve(num_layers).wanted()

    def capture_fingerprint(self) -> dict[str, Any]:
        """What is read: the head mean at the verdict position."""
        return {"source": "attention", "position": "last_prompt_token", "heads": "mean"}

    def capture(self, pairs: Sequence[PreferencePair], tools: Tools, layers: tuple[int, ...]) -> list[PairWeights]:
        """Both judge rounds of each pair, float32 rows of ``layers``; all prompts go to the judge in one call."""
        if tools.judge is None or tools.prompts is None:
            raise UserError("weights=attention reads a judge: set judge.path and judge.template_file")
        prompts = [prompt for pair in pairs for prompt in tools.prompts.build(pair)]
        readings = tools.judge.read(
            [prompt.input_ids for prompt in prompts],
            layers=layers,
            verdict=tools.verdict,
            label_ids=tools.prompts.label_ids if tools.verdict else None,
        )
        cut = iter([cut_round(prompt, read.rows, read) for prompt, read in zip(prompts, readings, strict=True)])
        return [PairWeights(pair.pair_id, (next(cut), next(cut))) for pair in pairs]

    def select(self, captured: PairWeights, layers: tuple[int, ...]) -> PairWeights:
        """``captured`` with one row left: the wanted layer, or the mean over ``self.layers``."""
        absent = [layer for layer in self.wanted() if layer not in layers]
        if absent:
            raise UserError(
                f"weights.layer: layer {absent[0]} is not among the layers at hand {list(layers)}; run attnpo.weigh "
                "with weights.store_layers=all"
            )
        places = [layers.index(layer) for layer in self.wanted()]

        def one_row(weights: TokenWeights) -> TokenWeights:
            return replace(weights, weights=weights.weights[places].mean(dim=0, keepdim=True))

        return replace(
            captured,
            rounds=tuple(
                replace(item, chosen=one_row(item.chosen), rejected=one_row(item.rejected)) for item in captured.rounds
            ),
        )
