"""Runs TRL's DPOTrainer as a competitor in its own environment, with only torch, transformers, datasets and trl.

    .venv-trl/bin/python -m experiments.benchmarks.trl_worker serve
    .venv-trl/bin/python -m experiments.benchmarks.trl_worker train '{"model": ..., "data": ..., ...}'

``serve`` answers the requests of ``step.py`` on a pipe, ``fits`` those of ``gpu.py``. ``train`` runs one epoch for
``pipeline.py``, or its first steps for ``start.py``. Every number comes from TRL's own methods on its own batches; one
buffer is made smaller, in TRL's favour (``fit_tile``).
"""

import gc
import json
import sys
import tempfile
import time
from dataclasses import fields
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars, load_dataset
from torch.utils.data import SequentialSampler
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import DPOConfig, DPOTrainer
from trl.trainer import utils

from experiments.benchmarks.harness import peak, serve, timed, versions

LIVE, CACHED = "live", "cached"
TILE = utils._CHUNKED_LOGPROB_CHUNK_SIZE
FIRST_STEP = "the first step begins"


def quiet() -> None:
    """Turns off progress bars and messages below warnings."""
    disable_progress_bars()
    logging.set_verbosity_warning()
    logging.disable_progress_bar()


def fit_tile(model: str) -> None:
    """Shrinks TRL's logits buffer to the width of the model's vocabulary.

    By default it has 32,768 columns, which an 8B model's vocabulary fills but a small one does not, so the unused
    memory would count against TRL. The numbers stay the same.
    """
    vocab = AutoConfig.from_pretrained(model).vocab_size
    utils._CHUNKED_LOGPROB_CHUNK_SIZE = min(TILE, vocab)


def shared_arguments(folder: str, threads: int | None) -> dict[str, Any]:
    """Returns the DPOConfig arguments of all measurements: full precision on the CPU, no checkpointing or reports."""
    if threads is not None:
        torch.set_num_threads(threads)
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "max_length": None,
    }


def printable(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments for printing, without the temporary folder."""
    return {name: value for name, value in given.items() if name != "output_dir"}


class Steps:
    """Trainers with live and precomputed reference, and their micro-batches."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.trainers: dict[str, DPOTrainer] = {}
        self.batches: dict[str, list[dict[str, Any]]] = {}

    def prepare(
        self,
        policy: str,
        reference: str,
        batches: list[list[list[list[int]]]],
        texts: list[list[list[str]]],
        beta: float,
        threads: int | None,
    ) -> dict[str, Any]:
        """Builds the trainers; returns their arguments and versions.

        ``batches`` hold (prompt, chosen, rejected) ids, ``texts`` the same as texts. Raises ``ValueError`` if TRL
        tokenises the texts into other ids.
        """
        quiet()
        fit_tile(policy)
        pairs = [pair for batch in texts for pair in batch]
        given = {
            **shared_arguments(self.folder.name, threads),
            "beta": beta,
            "per_device_train_batch_size": len(batches[0]),
        }
        for kind in (LIVE, CACHED):
            # A data set each: the one with precomputed sums keeps them beside it.
            rows = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs]
            trainer = DPOTrainer(
                model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
                ref_model=AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32),
                args=DPOConfig(**given, precompute_ref_log_probs=kind == CACHED),
                train_dataset=Dataset.from_list(rows),
                processing_class=AutoTokenizer.from_pretrained(policy),
            )
            trainer.current_gradient_accumulation_steps = 1  # what train() sets before its first step
            made = [trainer.train_dataset[index] for index in range(len(pairs))]
            expected = [pair for batch in batches for pair in batch]
            if [[row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]] for row in made] != expected:
                raise ValueError("TRL tokenised the texts into other ids than the benchmark")
            self.trainers[kind], self.batches[kind] = trainer, []
            for batch in batches:
                self.batches[kind].append(trainer.data_collator(made[: len(batch)]))
                made = made[len(batch) :]
        return {"arguments": printable(given), "versions": versions()}

    def losses(self, reference: str) -> list[float]:
        """Returns the loss of every micro-batch."""
        trainer = self.trainers[reference]
        trainer.model.train()
        with torch.no_grad():
            return [float(trainer.compute_loss(trainer.model, dict(batch))) for batch in self.batches[reference]]

    def step(self, reference: str) -> float:
        """Times forward and backward over all micro-batches."""
        return timed(lambda: self._step(reference))

    def memory(self, reference: str) -> int:
        """Returns the peak bytes of a step on top of weights and gradients."""
        self._step(reference)  # makes the gradients
        return peak(lambda: self._step(reference))

    def tokens(self) -> int:
        """Counts the tokens of all micro-batches, padding included."""
        return sum(batch["input_ids"].numel() for batch in self.batches[LIVE])

    def _step(self, reference: str) -> None:
        trainer = self.trainers[reference]
        for batch in self.batches[reference]:
            trainer.training_step(trainer.model, dict(batch))


class Clock(TrainerCallback):
    """Callback that records the seconds of each optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Starts the clock."""
        settle()
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Records the time."""
        settle()
        self.seconds.append(time.perf_counter() - self.start)


def settle() -> None:
    """Waits until the GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Sorted(DPOTrainer):
    """TRL's trainer with its data in the given order."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Fits:
    """TRL's optimizer steps at a model's size: random weights, one trainer after the other on the same model."""

    def load(self, folder: str, dtype: str, seed: int, threads: int | None) -> dict[str, Any]:
        """Makes a model from a folder's config, on the GPU if there is one."""
        quiet()
        self.cuda, self.given = torch.cuda.is_available(), shared_arguments("", threads)
        torch.manual_seed(seed)
        with torch.device("cuda" if self.cuda else "cpu"):
            config = AutoConfig.from_pretrained(folder)
            self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        self.folder = folder
        self.model.config._name_or_path = folder
        return {"versions": versions()}

    def fit(self, texts: list[list[str]], micro: int, checkpointing: bool, beta: float, steps: int) -> dict[str, Any]:
        """Times optimizer steps over all ``texts`` (prompt, chosen, rejected) in order; returns seconds and peak bytes.

        The reference's sums are precomputed. SGD replaces AdamW, which would not fit; this favours TRL.
        """
        disable = getattr(self.model, "activation_checkpointing_disable", None)
        (disable or self.model.gradient_checkpointing_disable)()
        clock, rows = Clock(), [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in texts]
        with tempfile.TemporaryDirectory() as output:
            given = {
                **self.given,
                "output_dir": output,
                "use_cpu": not self.cuda,
                "bf16": self.model.dtype == torch.bfloat16,
                "gradient_checkpointing": checkpointing,
                "beta": beta,
                "learning_rate": 1e-6,
                "optim": "sgd",
                "per_device_train_batch_size": micro,
                "gradient_accumulation_steps": len(texts) // micro,
                "max_steps": steps,
                "precompute_ref_log_probs": True,
            }
            try:
                trainer = Sorted(
                    model=self.model,
                    args=DPOConfig(**given),
                    train_dataset=Dataset.from_list(rows),
                    processing_class=AutoTokenizer.from_pretrained(self.folder),
                    callbacks=[clock],
                )
                if self.cuda:
                    torch.cuda.reset_peak_memory_stats()
                trainer.train()
                columns = [trainer.train_dataset[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids")]
                found = {"seconds": clock.seconds, "tokens": [sum(map(len, column)) for column in columns]}
                found["peak"] = torch.cuda.max_memory_allocated() if self.cuda else None
                found["arguments"] = printable(given)
            except torch.OutOfMemoryError:
                found = {"error": "out of memory"}
            trainer = None
            self.model.zero_grad()
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()
        return found


def train(
    model: str,
    data: str,
    beta: float,
    lr: float,
    warmup: float,
    micro: int,
    accumulation: int,
    seed: int,
    threads: int | None,
    steps: int = -1,
    cache: str | None = None,
) -> dict[str, Any]:
    """Runs one epoch of plain DPO with a live reference; returns seconds after the imports, token counts and arguments.

    ``steps`` ends it earlier. ``cache``: folder for tokenised rows. Prints a mark when the first step begins.
    """
    start = time.perf_counter()
    quiet()
    fit_tile(model)
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "max_steps": steps,
            **shared_arguments(folder, threads),
            "beta": beta,
            "learning_rate": lr,
            "warmup_steps": warmup,
            "lr_scheduler_type": "cosine",
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": accumulation,
            "num_train_epochs": 1,
            "seed": seed,
        }
        known = {field.name for field in fields(DPOConfig)}
        assert given.keys() <= known, given.keys() - known
        rows = load_dataset("json", data_files={"train": data}, cache_dir=cache or folder)["train"]
        trainer = DPOTrainer(
            model=model,
            args=DPOConfig(**given),
            train_dataset=rows.remove_columns(
                [name for name in rows.column_names if name not in ("chosen", "rejected")]
            ),
            processing_class=AutoTokenizer.from_pretrained(model),
        )
        columns: list[Any] = [[]]
        if steps < 0:  # reading them back takes long
            columns = [trainer.train_dataset[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids")]
        print(FIRST_STEP, file=sys.stderr, flush=True)
        result = trainer.train()
    return {
        "seconds": time.perf_counter() - start,
        "steps": result.global_step,
        "loss": result.training_loss,
        "pairs": len(columns[0]),
        "tokens": [sum(map(len, column)) for column in columns],
        "arguments": printable(given),
        "versions": versions(),
    }


def main() -> None:
    """Serves, trains, or only imports, depending on the first argument."""
    what, *details = sys.argv[1:]
    if what == "serve":
        steps = Steps()
        serve({name: getattr(steps, name) for name in ("prepare", "losses", "step", "memory", "tokens")})
    elif what == "fits":
        fits = Fits()
        serve({"load": fits.load, "fit": fits.fit})
    elif what == "train":
        print(json.dumps(train(**json.loads(details[0]))), flush=True)
    else:
        raise SystemExit(f"expected serve, fits or train, got {what!r}")


if __name__ == "__main__":
    main()
