"""Settings of a model: path, revision, number format, adapters. Plain, without any heavy import."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from attnpo.schema import BOOKKEEPING, UserError, check_at_least, check_range

ALL_LINEAR = "all-linear"
AUTO = "auto"
CHUNKS = (1024, 256)  # tokens at once through the vocabulary head, of which ``auto`` takes one: the quicker one first
DTYPES = ("float64", "float32", "bfloat16", "float16")
FULL = ("float64", "float32")  # what weights are trained in without losing small updates
QUANTIZED = ("nf4", "fp4")  # formats of 4 bits
COMPILER = "inductor"  # the backend of torch.compile that ``auto`` takes


@dataclass(frozen=True)
class LoraSpec:
    """Low-rank adapters that are trained in place of the weights.

    A linear layer W gets W + (alpha / rank) B A, where B starts at zero, and so does each fused expert, without
    dropout. ``target_modules``: "all-linear" or a list of ends of module names.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = ALL_LINEAR

    def __post_init__(self) -> None:
        check_at_least("model.lora", 1, rank=self.rank)
        check_range("model.lora", "(0, inf)", alpha=self.alpha)
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.lora.dropout must be from 0 up to, but below, 1; got {self.dropout}")
        if isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR:
            raise UserError(
                f"model.lora.target_modules must be {ALL_LINEAR} or a list of module names, got "
                f"{self.target_modules!r}; write model.lora.target_modules=[{self.target_modules}]"
            )
        if not self.target_modules:
            raise UserError(f"model.lora.target_modules is empty: name linear modules, or set it to {ALL_LINEAR}")


@dataclass(frozen=True)
class ModelSpec:
    """Causal LM: a local folder or a hub name.

    ``chat_template`` (Jinja text or path) replaces the tokenizer's; ``fallback_template`` serves where a tokenizer
    brings none; ``chat_template_kwargs`` are values that it reads; ``fold_system`` puts a system turn in front of the
    first user turn. ``dtype`` is that of the weights. With ``gradient_checkpointing`` every ``checkpoint_every``-th
    block is computed again in the backward pass; ``logps_chunk`` tokens meet the vocabulary head at once; either may be
    "auto": the quickest of ``choices`` that has room. ``quantize`` (nf4, fp4) keeps the blocks' linear layers in 4 bits
    beside ``lora``. ``compile`` names a backend of ``torch.compile``, or "auto". ``reward`` trains a head for
    sequences. ``router_aux_loss_coef`` times the load-balancing loss is added to each pair's loss.
    """

    path: str
    revision: str | None = None
    dtype: str = "float32"
    attn_implementation: str = "sdpa"
    chat_template: str | None = None
    fallback_template: str | None = None
    chat_template_kwargs: Mapping[str, object] | None = field(default=None, hash=False)
    fold_system: bool = False
    gradient_checkpointing: bool | str = False
    checkpoint_every: int = 1
    logps_chunk: int | str = field(default=CHUNKS[0], metadata=BOOKKEEPING)
    lora: LoraSpec | None = None
    quantize: str | None = None
    compile: str | None = None
    reward: bool = False
    router_aux_loss_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"model.dtype: unknown dtype {self.dtype!r}; one of {', '.join(DTYPES)}")
        if self.quantize is not None:
            self._check_quantized()
        if isinstance(self.gradient_checkpointing, str) and self.gradient_checkpointing != AUTO:
            raise UserError(
                f"model.gradient_checkpointing must be true, false or {AUTO}, got {self.gradient_checkpointing!r}"
            )
        if self.logps_chunk != AUTO and (isinstance(self.logps_chunk, str) or self.logps_chunk < 1):
            raise UserError(f"model.logps_chunk must be at least 1 token, or {AUTO}, got {self.logps_chunk!r}")
        check_at_least("model", 1, checkpoint_every=self.checkpoint_every)
        if self.checkpoint_every > 1 and not self.gradient_checkpointing:
            raise UserError(
                f"model.checkpoint_every={self.checkpoint_every} says which blocks are computed again, and none is: "
                "set model.gradient_checkpointing=true as well"
            )
        check_at_least("model", 0, router_aux_loss_coef=self.router_aux_loss_coef)
        balance = self.router_aux_loss_coef or None
        compiler = None if self.compile == AUTO else self.compile
        if balance and compiler:
            raise UserError(
                f"model.router_aux_loss_coef={balance:g} reads router logits inside the blocks, which compiled ones do "
                "not hand out: set model.compile=null"
            )
        parts = {"lora": self.lora, "quantize": self.quantize, "compile": compiler, "router_aux_loss_coef": balance}
        given = [name for name, value in parts.items() if value is not None]
        if self.reward and given:
            raise UserError(
                f"model.reward=true trains all weights of a reward model as they are: set model.{given[0]}="
                f"{0 if parts[given[0]] is balance else 'null'}"
            )

    @property
    def recomputes(self) -> bool:
        """Returns whether activations are computed again in the backward pass."""
        return bool(self.gradient_checkpointing)

    @property
    def chunk(self) -> int:
        """Returns how many tokens meet the vocabulary head at once."""
        return CHUNKS[-1] if isinstance(self.logps_chunk, str) else self.logps_chunk

    @property
    def is_compiled(self) -> bool:
        """Tells whether blocks keep for their backward what a compiler leaves of it."""
        return self.compile in (AUTO, COMPILER)

    def backend(self, device: str) -> tuple[str | None, str]:
        """Returns the backend of ``torch.compile`` for the blocks on a kind of device, and the reason of ``auto``."""
        if self.compile != AUTO:
            return self.compile, "as it is set"
        if device != "cuda":
            return None, f"on a device of kind {device}"
        if self.reward:
            return None, "for a reward model"
        if self.router_aux_loss_coef:
            return None, "with model.router_aux_loss_coef, which reads inside the blocks"
        return COMPILER, "on a CUDA device"

    def choices(self) -> list["ModelSpec"]:
        """Returns what this may become once every ``auto`` is decided, from the quickest to that of least memory."""
        blocks = (False, True) if self.gradient_checkpointing == AUTO else (self.gradient_checkpointing,)
        chunks = CHUNKS if self.logps_chunk == AUTO else (self.logps_chunk,)
        return [
            replace(
                self,
                gradient_checkpointing=again,
                checkpoint_every=self.checkpoint_every if again else 1,
                logps_chunk=chunk,
            )
            for again in blocks
            for chunk in chunks
        ]

    def _check_quantized(self) -> None:
        if self.quantize not in QUANTIZED:
            raise UserError(f"model.quantize must be null or one of {', '.join(QUANTIZED)}, got {self.quantize!r}")
        if self.lora is None:
            raise UserError(f"model.quantize={self.quantize}: weights of 4 bits cannot be trained; set model=qlora")
        if self.dtype == "float64":
            raise UserError(
                f"model.quantize={self.quantize}: there are no products of 4-bit weights in float64; set "
                "model.dtype=bfloat16 or float32"
            )


BATCH_SIZE = 32  # prompts
TOKEN_BUDGET = 65536  # padded prompts and room for answers: 32 prompts of 2048 tokens
