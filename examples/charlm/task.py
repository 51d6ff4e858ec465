"""A small GPT that learns to write Python, character by character, from the standard library's own sources.

    cloudtrain submit -f examples/charlm/cloudtrain.yaml

The model follows GPT-2 (Radford et al. 2019) as nanoGPT writes it. In comments B is samples, T characters, C width.
"""

import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

# Read in this order and cut at TEXT_BYTES, so that every machine with the same Python has the same text.
MODULES = [
    *("argparse", "ast", "bdb", "calendar", "cmd", "codecs", "configparser", "contextlib", "copy", "csv"),
    *("dataclasses", "datetime", "difflib", "dis", "doctest", "enum", "fractions", "ftplib", "functools", "gzip"),
    *("heapq", "inspect", "ipaddress", "locale", "mailbox", "mimetypes", "optparse", "os", "pathlib", "pdb"),
    *("pickle", "platform", "pprint", "random", "shutil", "smtplib", "socket", "ssl", "statistics", "string"),
    *("subprocess", "tarfile", "tempfile", "textwrap", "threading", "tokenize", "traceback", "turtle", "typing"),
]
TEXT_BYTES = 1_000_000
EVAL_SHARE = 0.05
VOCABULARY = 128  # ASCII; anything else is read as `?`


class Windows(torch.utils.data.Dataset):
    """Item i: T characters and the same shifted by one, both int64 (T,), begun at random in the i-th stretch of T."""

    def __init__(self, text, length, jitter):
        self.text, self.length, self.jitter = text, length, jitter

    def __len__(self):
        return (len(self.text) - 1) // self.length - 1

    def __getitem__(self, index):
        start = index * self.length
        if self.jitter:
            start += int(torch.randint(self.length, ()))
        window = self.text[start : start + self.length + 1].long()
        return window[:-1], window[1:]


def dataset(params, split):
    if split not in ("train", "eval"):
        return None
    folder = Path(sysconfig.get_path("stdlib"))
    found = [path for name in MODULES if (path := folder / f"{name}.py").is_file()]
    text = b"\n".join(path.read_text("utf-8").encode("ascii", "replace") for path in found)[:TEXT_BYTES]
    held_back = int(EVAL_SHARE * len(text))
    part = text[-held_back:] if split == "eval" else text[:-held_back]
    return Windows(torch.frombuffer(bytearray(part), dtype=torch.uint8), params["context"], jitter=split == "train")


class Block(nn.Module):
    """Attention to what came before, then a two-layer network, each added to its input."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.head_width, self.dropout = width // heads, dropout
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))  # separate: tensor ranks share each
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.drop(self.attend(self.norm_attention(x)))
        return x + self.drop(self.mlp(self.norm_mlp(x)))

    def attend(self, x):
        # (B, heads, T, head_width) each; under `parallel.tensor` a rank has a part of the heads
        q, k, v = (part(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).flatten(2))

    def drop(self, x):
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    def __init__(self, context, layers, heads, width, dropout):
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.apply(self.initialise)
        for block in self.blocks:  # each block adds twice to the stream, so what it adds starts smaller
            for last in (block.project, block.mlp[2]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))

    @staticmethod
    def initialise(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, text):
        """Return scores of the next character, (B, T, VOCABULARY), for characters (B, T)."""
        x = self.characters(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.characters.weight)  # the same matrix reads and writes


def model(params):
    return GPT(params["context"], params["layers"], params["heads"], params["width"], params["dropout"])


def loss(model, batch):
    text, following = batch
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten())


def evaluate(model, batch):
    return {"bits_per_character": loss(model, batch) / math.log(2)}
