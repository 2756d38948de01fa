"""transformers' Trainer: kill it, start it again, and it goes on in the middle of the epoch.

holdfast serve &
pip install 'holdfast[hf]'
python examples/hf.py
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, set_seed

import holdfast
from holdfast.integrations.hf import HoldfastTrainer


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']:.9g}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="examples/hf", help="project/run")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    set_seed(0)
    tokens = torch.randint(0, 64, (256, 16))
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="hf-"),  # no checkpoint is written here
        max_steps=options.steps,
        per_device_train_batch_size=8,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="steps",
        save_steps=20,
        save_total_limit=3,
        report_to=[],
        disable_tqdm=True,
    )
    with holdfast.Checkpointer(options.run, save=holdfast.OnPreemption()) as checkpointer:
        trainer = HoldfastTrainer(
            GPT2LMHeadModel(config),
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
            callbacks=[PrintLoss()],
            checkpointer=checkpointer,
        )
        trainer.train(resume_from_checkpoint=True)


if __name__ == "__main__":
    main()
