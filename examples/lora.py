"""LoRA with PEFT: the base model is sent once, and each save after it is the adapter and its optimizer.

holdfast serve &
pip install 'holdfast[hf]' peft
python examples/lora.py
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, set_seed

import holdfast
from holdfast.integrations.hf import HoldfastTrainer


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']:.9g}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="examples/lora", help="project/run")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    set_seed(0)
    tokens = torch.randint(0, 64, (256, 16))
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = get_peft_model(
        GPT2LMHeadModel(config), LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    )
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="lora-"),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="steps",
        save_steps=20,
        report_to=[],
        disable_tqdm=True,
    )
    # What is declared frozen is staged and hashed at the first save only. It would be sent once either way.
    base = [f"model/{name}" for name, parameter in model.named_parameters() if not parameter.requires_grad]
    with holdfast.Checkpointer(options.run, save=holdfast.OnPreemption(), frozen=base) as checkpointer:
        trainer = HoldfastTrainer(
            model,
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
            callbacks=[PrintLoss()],
            checkpointer=checkpointer,
        )
        trainer.train(resume_from_checkpoint=True)


if __name__ == "__main__":
    main()
