"""Lightning's Trainer: kill it, start it again, and it goes on with the next epoch, on this node or another.

holdfast serve &
pip install 'holdfast[lightning]'
python examples/lightning_fit.py
"""

from __future__ import annotations

import argparse
import logging
import tempfile

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from holdfast.integrations.lightning import HoldfastCallback, HoldfastCheckpointIO


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(64, 1)
        )

    def training_step(self, batch, at):
        (inputs,) = batch
        loss = (self.net(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        self.log("loss", loss)
        print(f"step {self.global_step + 1} loss {loss.item():.9g}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="examples/lightning", help="project/run")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

    pl.seed_everything(0)
    module = Regression()
    data = torch.utils.data.TensorDataset(torch.randn(80, 32))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)

    # With several devices: strategy=HoldfastDDPStrategy(options.run) or HoldfastModelParallelStrategy(…) instead.
    io = HoldfastCheckpointIO(options.run)
    names = tempfile.mkdtemp(prefix="lightning-")  # small files that name checkpoints of the run
    trainer = pl.Trainer(
        max_epochs=options.steps // len(loader),
        devices=1,
        plugins=[io],
        callbacks=[HoldfastCallback(), ModelCheckpoint(dirpath=names, monitor="loss", save_top_k=2, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, ckpt_path=io.last())  # "last" where the folder is always the same


if __name__ == "__main__":
    main()
