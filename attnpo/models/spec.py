"""Model settings: path, revision, dtype, adapters. Avoids heavy imports."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from attnpo.schema import BOOKKEEPING, UserError, check_at_least, check_range

ALL_LINEAR = "all-linear"
AUTO = "auto"
CHUNKS = (1024, 256)  # tokens per chunk of the vocabulary head that ``auto`` chooses from, the faster one first
DTYPES = ("float64", "float32", "bfloat16", "float16")
FULL = ("float64", "float32")  # dtypes that keep small weight updates
QUANTIZED = ("nf4", "fp4")  # 4-bit formats
COMPILER = "inductor"  # torch.compile backend used by ``auto``


@dataclass(frozen=True)
class LoraSpec:
    """Low-rank adapters, trained instead of the full weights.

    A linear layer W becomes W + (alpha / rank) B A, with B initialised to zero; each fused expert gets its own adapter
    if dropout is 0. ``target_modules``: "all-linear" or a list of module name suffixes.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = ALL_LINEAR

    def __post_init__(self) -> None:
        check_at_least("model.lora", 1, rank=self.rank)
        check_range("model.lora", "(0, inf)", alpha=self.alpha)
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.lora.dropout must be in [0, 1), got {self.dropout}")
        if isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR:
            raise UserError(
                f"model.lora.target_modules must be {ALL_LINEAR} or a list of module names, got "
                f"{self.target_modules!r}: write model.lora.target_modules=[{self.target_modules}]"
            )
        if not self.target_modules:
            raise UserError(f"model.lora.target_modules is empty: name linear modules, or set it to {ALL_LINEAR}")


@dataclass(frozen=True)
class ModelSpec:
    """Causal LM, given by a local folder or a hub name.

    ``chat_template`` (Jinja text or path) replaces the tokenizer's; ``fallback_template`` is used if the tokenizer has
    none; ``chat_template_kwargs`` are passed to the template; ``fold_system`` merges a system turn into the first user
    turn. ``dtype`` is the dtype of the weights. With ``gradient_checkpointing`` every ``checkpoint_every``-th block is
    recomputed in the backward pass; ``logps_chunk`` tokens pass through the vocabulary head at once. Both can be
    "auto": the fastest of ``memory_choices`` that fits. ``quantize`` (nf4, fp4) stores the blocks' linear layers in 4
    bits and needs ``lora``. ``compile``: a ``torch.compile`` backend, or "auto". ``reward`` trains a sequence
    classification head. ``router_aux_loss_coef`` scales the load-balancing loss added to each pair's loss.
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
            raise UserError(f"model.dtype: unknown dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}")
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
                f"model.checkpoint_every={self.checkpoint_every} has no effect without gradient checkpointing: set "
                "model.gradient_checkpointing=true as well"
            )
        check_at_least("model", 0, router_aux_loss_coef=self.router_aux_loss_coef)
        balance = self.router_aux_loss_coef or None
        compiler = None if self.compile == AUTO else self.compile
        if balance and compiler:
            raise UserError(
                f"model.router_aux_loss_coef={balance:g} needs each block's router logits, but compiled blocks do "
                "not return them: set model.compile=null"
            )
        parts = {"lora": self.lora, "quantize": self.quantize, "compile": compiler, "router_aux_loss_coef": balance}
        given = [name for name, value in parts.items() if value is not None]
        if self.reward and given:
            raise UserError(
                f"model.reward=true trains all weights of an unmodified reward model: set model.{given[0]}="
                f"{0 if parts[given[0]] is balance else 'null'}"
            )

    @property
    def uses_checkpointing(self) -> bool:
        """Returns whether activations are recomputed in the backward pass."""
        return bool(self.gradient_checkpointing)

    @property
    def chunk(self) -> int:
        """Returns the number of tokens that pass through the vocabulary head at once."""
        return CHUNKS[-1] if isinstance(self.logps_chunk, str) else self.logps_chunk

    @property
    def is_compiled(self) -> bool:
        """Returns whether the blocks are compiled, which changes the activations saved for the backward pass."""
        return self.compile in (AUTO, COMPILER)

    def backend(self, device: str) -> tuple[str | None, str]:
        """Returns the ``torch.compile`` backend for a device type, and the reason if ``auto`` selected it."""
        if self.compile != AUTO:
            return self.compile, "as it is set"
        if device != "cuda":
            return None, f"on a device of type {device}"
        if self.reward:
            return None, "for a reward model"
        if self.router_aux_loss_coef:
            return None, "with model.router_aux_loss_coef, which needs each block's router logits"
        return COMPILER, "on a CUDA device"

    def memory_choices(self) -> list["ModelSpec"]:
        """Lists the settings that can replace ``auto``, from the fastest to the one that needs the least memory."""
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
            raise UserError(f"model.quantize={self.quantize}: 4-bit weights cannot be trained; set model=qlora")
        if self.dtype == "float64":
            raise UserError(
                f"model.quantize={self.quantize}: 4-bit weights cannot be multiplied in float64; set "
                "model.dtype=bfloat16 or float32"
            )


BATCH_SIZE = 32  # prompts
TOKEN_BUDGET = 65536  # padded prompts plus room for answers: 32 prompts of 2048 tokens
