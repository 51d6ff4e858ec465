"""A regression with Lightning, in the form of its documentation.

torchrun --nproc-per-node 2 train.py --max_epochs 5
"""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.network(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_epochs", type=int, default=5)
    parser.add_argument("--ckpt_path", help="a checkpoint of lightning_logs/ to continue from")
    args = parser.parse_args()
    x = torch.randn(4096, 20, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=32, shuffle=True)
    trainer = L.Trainer(max_epochs=args.max_epochs, callbacks=[ModelCheckpoint(save_last=True)])
    trainer.fit(Regression(), loader, ckpt_path=args.ckpt_path)


if __name__ == "__main__":
    main()
