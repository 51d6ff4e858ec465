"""Handwritten digits (UCI, 1,797 images of 8 x 8, shipped with scikit-learn): a small CNN, 98 to 99 % in seconds.

    cloudtrain submit -f examples/digits/cloudtrain.yaml

Plain functions and nothing of cloudtrain's: what they return is all that the shared trainer needs.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

TEST_SHARE = 0.2


class Digits(torch.utils.data.Dataset):
    """Images as float32 (1, 8, 8) in 0 .. 1, labels as int64; the training split is shifted by up to a pixel."""

    def __init__(self, images, labels, shift):
        self.images, self.labels, self.shift = images, labels, shift

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.shift:  # drawn anew in each epoch, and again the same after a resume
            down, right = torch.randint(-self.shift, self.shift + 1, (2,)).tolist()
            image = F.pad(image, (1, 1, 1, 1))[:, 1 + down : 9 + down, 1 + right : 9 + right]
        return image, self.labels[index]


def dataset(params, split):
    if split not in ("train", "eval"):
        return None
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    # The same images are held back in every run, whatever the job's seed.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_back = int(TEST_SHARE * len(labels))
    chosen = order[:held_back] if split == "eval" else order[held_back:]
    return Digits(images[chosen], labels[chosen], shift=1 if split == "train" and params.get("shift", True) else 0)


def model(params):
    width, dropout = params.get("width", 32), params.get("dropout", 0.2)
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * width * 16, 128),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(128, 10),
    )


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def evaluate(model, batch):
    images, labels = batch
    scores = model(images)
    return {"accuracy": (scores.argmax(1) == labels).float().mean(), "loss": F.cross_entropy(scores, labels)}
