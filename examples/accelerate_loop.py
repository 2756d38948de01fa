"""A loop of one's own with Accelerate: kill it, launch it again, and it goes on in the middle of the epoch.

holdfast serve &
pip install 'holdfast[accelerate]'
accelerate launch examples/accelerate_loop.py        # or: python examples/accelerate_loop.py
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

import holdfast
from holdfast.integrations.accelerate import training_state


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="examples/accelerate", help="project/run")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    # A seedable sampler shuffles by seed and epoch, and so alike after a resume.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.5)
    data = torch.utils.data.TensorDataset(torch.randn(640, 32))
    # Its own generator: making an iterator draws a number, and dropout would be another one after a resume.
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator())
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    average = torch.optim.swa_utils.AveragedModel(accelerator.unwrap_model(model))
    accelerator.register_for_checkpointing(average)

    state = training_state(accelerator)
    with holdfast.Checkpointer(options.run, save=holdfast.Every(steps=20)) as checkpointer:
        step = checkpointer.restore(state)
        while step < options.steps:
            epoch, done = divmod(step, len(loader))
            loader.set_epoch(epoch)
            for (inputs,) in accelerator.skip_first_batches(loader, done) if done else loader:
                loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                average.update_parameters(accelerator.unwrap_model(model))
                if accelerator.is_main_process:
                    print(f"step {step} loss {loss.item():.9g}", flush=True)
                checkpointer.step(step, state, metrics={"loss": loss})
                step += 1
                if step == options.steps:
                    break

    accelerator.end_training()


if __name__ == "__main__":
    main()
