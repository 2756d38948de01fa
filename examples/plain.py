"""One process, one device. Kill it, start it again, and it goes on.

holdfast serve &
python examples/plain.py
"""

from __future__ import annotations

import argparse

import torch

import holdfast


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="examples/plain", help="project/run")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(64, 1))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.5)

    state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
    with holdfast.Checkpointer(options.run, save=holdfast.Every(steps=20)) as checkpointer:
        for step in range(checkpointer.restore(state), options.steps):
            inputs = torch.randn(16, 32, device=device)  # the state of the random generators is part of a checkpoint
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            print(f"step {step} loss {loss.item():.9g}", flush=True)
            checkpointer.step(step, state, metrics={"loss": loss})


if __name__ == "__main__":
    main()
