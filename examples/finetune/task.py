"""Fine-tuning: odd or even, from the network of examples/digits. The body is taken over and frozen, the head is new.

    cloudtrain submit -f examples/digits/cloudtrain.yaml --name digits
    cloudtrain submit -f examples/finetune/cloudtrain.yaml

`init_from` in the config loads the body before step 1; the names are those of the parent's `model`.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

TEST_SHARE = 0.2
HEAD = 10  # the index of the last layer, whose 10 outputs become 2


def dataset(params, split):
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(digits.target).long() % 2
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_back = int(TEST_SHARE * len(labels))  # the images that the parent has not been trained on, either
    parts = {"test": order[: held_back // 2], "eval": order[held_back // 2 : held_back], "train": order[held_back:]}
    if split not in parts:
        return None
    return torch.utils.data.TensorDataset(images[parts[split]], labels[parts[split]])


def model(params):
    width, dropout = params.get("width", 32), params.get("dropout", 0.2)
    net = nn.Sequential(
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
        nn.Linear(128, params.get("outputs", 2)),
    )
    net[:HEAD].requires_grad_(not params.get("freeze", True))
    return net


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def evaluate(model, batch):
    images, labels = batch
    scores = model(images)
    return {"accuracy": (scores.argmax(1) == labels).float().mean(), "loss": F.cross_entropy(scores, labels)}


def outputs(model, batch):
    """For the test: the figures by class, the calibration and the worst samples follow from these."""
    images, labels = batch
    return {"target": labels, "score": model(images)}
