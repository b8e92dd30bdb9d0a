"""Settings of the base model and of the pairs; cheap to import, so configs can be checked without transformers."""

from dataclasses import asdict, dataclass, field

# Settings added after the first bases were stored; left out of a base's identity if they have their default value.
_LATER = ("merges", "easy_length", "answer_tokens")
# Integer settings of the base that must be at least 1.
_COUNTS = (
    "layers",
    "width",
    "heads",
    "mlp",
    "max_positions",
    "steps",
    "answer_rows",
    "judge_rows",
    "score_rows",
    "answer_tokens",
)


@dataclass(frozen=True)
class BaseRecipe:
    """Settings for training the base model.

    initializer_range .06 is essential: with .02, the judge stays at chance. Training runs for `steps` with a cosine
    schedule. While the judge's accuracy on the base's own samples (gap >= judge_margin, both orders, the worse prompt
    assembly) is below judge_gate, blocks of `extra_steps` are added, up to `max_steps` in total. During the first
    `easy_share` of a block, the judge only sees pairs with a gap of at least `easy_gap`, and afterwards all pairs with
    unequal rewards. Without this the judge is still at .77 after 400 steps; with it, accuracy jumps at about step 100.
    `damage`: share of clauses that are damaged in reviews to judge or score. A judge trained without damage is correct
    on .99 of the pairs without broken clauses, but only on .87 of the others. `merges`: number of merges of a
    byte-level BPE (with 500, most words are one token), which needs more steps; None gives one token per word.

    With `easy_length` below 1, reviews in the first half of the first block's easy part have this share of the
    grammar's length, with fillers dropped first and more rows per batch to compensate; they grow to full length in the
    second half. For reviews of 28 clauses with six sentiment clauses, a judge trained at growing length with fillers is
    still at chance after 250 steps; one trained on 3 or 4 clauses without fillers is correct on nearly all pairs after
    100 steps. `answer_tokens`: maximum length of answers when measuring the base, and the base's default for
    generation.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    mlp: int = 256
    initializer_range: float = 0.06
    max_positions: int = 512
    learning_rate: float = 2e-3
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.01
    warmup: int = 30
    final_fraction: float = 0.02
    clip: float = 1.0
    steps: int = 400
    answer_rows: int = 20
    judge_rows: int = 32
    score_rows: int = 4
    easy_share: float = 0.4
    easy_gap: float = 0.8
    damage: float = 0.08
    judge_gate: float = 0.85
    judge_margin: float = 0.5
    judge_pairs: int = 300
    extra_steps: int = 60
    max_steps: int = 600
    merges: int | None = None
    easy_length: float = 1.0
    answer_tokens: int = 64

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in _COUNTS}
        if min(sizes.values()) < 1:
            raise ValueError(f"base: each of {', '.join(sizes)} must be at least 1, got {sizes}")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"base.width must be an even multiple of base.heads, got {self.width} and {self.heads}")
        if self.merges is not None and self.merges < 0:
            raise ValueError(f"base.merges must be at least 0, or null for one token per word, got {self.merges}")
        if not 0.0 < self.easy_length <= 1.0:
            raise ValueError(f"base.easy_length is a share and must lie in (0, 1], got {self.easy_length}")

    def identity(self) -> dict[str, object]:
        """Returns the settings that identify this base."""
        plain = BaseRecipe()
        return {k: v for k, v in asdict(self).items() if k not in _LATER or v != getattr(plain, k)}


@dataclass(frozen=True)
class SecondRecipe:
    """Second base that judges for the first; it has the same grammar but a different vocabulary and less training.

    Its seed is the first base's plus `seed_offset`, so that the bases of a study never share a seed.
    """

    base: BaseRecipe = field(default_factory=lambda: BaseRecipe(merges=400, steps=300, judge_gate=0.7, max_steps=480))
    seed_offset: int = 1000


@dataclass(frozen=True)
class PairRecipe:
    """Settings for building preference pairs.

    `train`, `validation`: number of pairs per split; a smaller training set is a prefix of a larger one, except for the
    sides swapped by `label_noise`. `margin`: minimum true reward gap. `label_noise`: share of training pairs with
    swapped sides (validation pairs are never swapped). `answers_per_prompt`: samples per prompt and round.
    `min_tokens`: shorter answers are dropped, as are answers without an end token or with other special tokens.
    """

    train: int = 768
    validation: int = 128
    margin: float = 0.5
    label_noise: float = 0.0
    answers_per_prompt: int = 4
    min_tokens: int = 5
    max_new_tokens: int = 64
    temperature: float = 1.0
    max_rounds: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_noise <= 1.0:
            raise ValueError(f"pairs.label_noise is a share and must lie in [0, 1], got {self.label_noise}")
        if self.margin <= 0:
            raise ValueError(f"pairs.margin must be positive (equal rewards express no preference), got {self.margin}")
        if self.train < 1 or self.validation < 1:
            raise ValueError(f"pairs.train and pairs.validation must be >= 1, got {self.train}, {self.validation}")
        if self.max_new_tokens < 1 or self.max_rounds < 1 or self.temperature < 0:
            raise ValueError(
                "pairs.max_new_tokens and pairs.max_rounds must be at least 1 and pairs.temperature at least 0, got "
                f"{self.max_new_tokens}, {self.max_rounds} and {self.temperature}"
            )
        if self.answers_per_prompt < 2:
            raise ValueError(f"pairs.answers_per_prompt must be at least 2, got {self.answers_per_prompt}")
