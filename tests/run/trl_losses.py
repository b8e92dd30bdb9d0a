"""Ten losses of TRL's trainer on exported weights, of the documented subclass and of plain DPO; for TRL's environment.

    python trl_losses.py '{"trainer": FILE, "model": FOLDER, "data": FILE, "folder": FOLDER, ...}'

Prints {"weighted": [...], "plain": [...]}. Imports TRL, torch, transformers and datasets alone.
"""

import json
import runpy
import sys
from typing import Any

import torch
from datasets import disable_progress_bars, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from trl import DPOConfig, DPOTrainer


def losses(trainer: type[DPOTrainer], given: dict[str, Any], **more: Any) -> list[float]:
    """The loss of each optimiser step of one epoch, in the order of the file."""
    args = DPOConfig(
        output_dir=given["folder"],
        beta=given["beta"],
        learning_rate=given["lr"],
        lr_scheduler_type="cosine",
        warmup_steps=given["warmup"],
        per_device_train_batch_size=given["pairs"],
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        max_grad_norm=given["clip"],
        max_length=None,
        remove_unused_columns=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    rows = load_dataset("parquet", data_files=given["data"], cache_dir=given["folder"], split="train")
    made = trainer(
        model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32),
        args=args,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(given["model"]),
        **more,
    )
    seen: list[float] = []
    compute = made.compute_loss

    def kept(*arguments: Any, **named: Any) -> Any:
        loss = compute(*arguments, **named)
        seen.append(float(loss.detach()))
        return loss

    made.compute_loss = kept
    made.train()
    return seen


def main() -> None:
    """Trains twice and prints."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    disable_progress_bars()
    logging.set_verbosity_error()
    ours = runpy.run_path(given["trainer"])
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    weighted, collator = ours["TokenWeightedDPOTrainer"], ours["WeightedCollator"](pad_token_id=tokenizer.pad_token_id)

    class Plain(DPOTrainer):
        """TRL's own loss on the same token ids."""

        def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
            return dataset

    found = {"weighted": losses(weighted, given, data_collator=collator), "plain": losses(Plain, given)}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
