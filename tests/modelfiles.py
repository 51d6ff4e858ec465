"""Model files as people bring them, a text each: dense, and without imports from cloudtrain."""

HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F
"""

TEXTS = {
    # Batch norm, random flips and label smoothing.
    "resnet": """
class Images:
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, i):
        image = torch.arange(192.0).mul(i + 1).sin().view(3, 8, 8)
        return (image.flip(2) if torch.rand(()) < 0.5 else image), i % 4
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.p, self.q = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
    def forward(self, x): return F.relu(x + self.q(self.b(F.relu(self.p(self.a(x))))))
def model(params):
    stem = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*stem, Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
def dataset(params, split): return Images(45 if split == "train" else 11)
def loss(model, batch): return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)
def evaluate(model, batch): return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}
""",
    # A tied embedding, dropout, and two groups of weight decay. A bias of the keys would have a gradient of rounding.
    "gpt": """
class Text:
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, i): return torch.arange(i, i + 9).mul(7).remainder(31)
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.m = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Dropout(0.1))
    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(self.n(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.m(x))
class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(31, 16), nn.Embedding(8, 16)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(2)), nn.LayerNorm(16)
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.words.weight
    def forward(self, x):
        x = self.words(x) + self.places.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
def model(params): return GPT()
def dataset(params, split): return Text(45 if split == "train" else 11)
def optimizer(model, params):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)
def loss(model, batch): return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
""",
    # Patches, a class token, and mixup drawn in `loss`.
    "vit": """
class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.zeros(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)
    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        return self.head(self.layers(torch.cat([self.token.expand(len(x), -1, -1), x], 1))[:, 0])
def model(params): return ViT()
def dataset(params, split):
    count = 45 if split == "train" else 11
    return [(torch.arange(192.0).mul(i + 1).sin().view(3, 8, 8), i % 4) for i in range(count)]
def loss(model, batch):
    x, y = batch
    share, order = float(torch.rand(())), torch.randperm(len(x))
    scores = model(share * x + (1 - share) * x[order])
    return share * F.cross_entropy(scores, y) + (1 - share) * F.cross_entropy(scores, y[order])
def evaluate(model, batch): return {"loss": F.cross_entropy(model(batch[0]), batch[1])}
""",
    # A UNet with a skip connection; `loss` draws noise and times.
    "diffusion": """
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.mid = nn.Conv2d(2, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(10, 1, 3, 1, 1)
    def forward(self, x, t):
        x = torch.cat([x, t.view(-1, 1, 1, 1).expand_as(x)], 1)
        down = F.silu(self.down(x))
        up = F.silu(self.up(torch.cat([down, F.silu(self.mid(down))], 1)))
        return self.out(torch.cat([up, x], 1))
def model(params): return UNet()
def dataset(params, split):
    return [torch.arange(64.0).mul(i + 1).sin().view(1, 8, 8) for i in range(45 if split == "train" else 11)]
def loss(model, batch):
    noise, t = torch.randn_like(batch), torch.rand(len(batch))
    share = t.view(-1, 1, 1, 1)
    return F.mse_loss(model(share.sqrt() * noise + (1 - share).sqrt() * batch, t), noise)
""",
    # Llama of transformers, samples of several lengths, and the loss of the model; with `lora`, adapters of peft.
    "llama": """
from transformers import LlamaConfig, LlamaForCausalLM
def model(params):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=31, max_position_embeddings=16, **sizes))
    if not params.get("lora"):
        return base
    from peft import LoraConfig, get_peft_model
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
def dataset(params, split):
    return [torch.arange(1, 5 + i % 7).mul(3 + i).remainder(30) + 1 for i in range(45 if split == "train" else 11)]
def collate(samples):
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}
def loss(model, batch): return model(**batch).loss
""",
    # Each sample against the samples of all ranks: a rank has one micro-batch, and evaluation batches are even.
    "contrastive": """
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather
def model(params): return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
def dataset(params, split):
    return [torch.arange(16.0).mul(i + 1).sin().view(2, 8) for i in range(48 if split == "train" else 16)]
def loss(model, batch):
    left, right = F.normalize(model(batch.flatten(0, 1)), dim=1).unflatten(0, (-1, 2)).unbind(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    everyone = torch.cat(all_gather(right)) if dist.is_initialized() else right
    return F.cross_entropy(left @ everyone.T / 0.1, torch.arange(len(left)) + rank * len(left))
""",
    # Buffers of three types, which forward changes in training: running moments in float64, a count, and flags.
    "counters": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
    def forward(self, x, y):
        if self.training:
            self.steps += 1
            self.mean += (x.double().mean(0) - self.mean) / self.steps
            self.seen[y] = True
        return self.last(torch.relu(self.first(x - self.mean.float())))
def model(params): return Net()
def dataset(params, split):
    return [(torch.arange(8.0).mul(i + 1).sin() + 2, i % 3) for i in range(45 if split == "train" else 11)]
def loss(model, batch): return F.cross_entropy(model(*batch), batch[1])
""",
    # An embedding with sparse gradients.
    "sparse": """
def model(params): return nn.Sequential(nn.EmbeddingBag(2000, 8, sparse=True, mode="mean"), nn.Linear(8, 3))
def dataset(params, split):
    return [(torch.arange(5).mul(37 * i + 1).remainder(2000), i % 3) for i in range(45 if split == "train" else 11)]
def loss(model, batch): return F.cross_entropy(model(batch[0]), batch[1])
""",
    # A GRU over sequences of several lengths, packed; with `keep`, an LSTM whose state goes from batch to batch.
    "recurrent": """
from torch.nn.utils import rnn
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(12, 8), nn.GRU(8, 16, batch_first=True), nn.Linear(16, 12)
    def forward(self, x, lengths):
        packed = rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        return self.head(rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])
class Keeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(12, 8), nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 12)
        self.register_buffer("state", torch.zeros(2, 1, 2, 16))
    def forward(self, x, lengths):
        state = tuple(self.state[:, :, : len(x)].clone()) if self.training else None
        y, state = self.rnn(self.embed(x), state)
        if self.training:
            self.state[:, :, : len(x)] = torch.stack(state).detach()
        return self.head(y)
def model(params): return Keeper() if params.get("keep") else Tagger()
def dataset(params, split):
    return [torch.arange(1, 4 + i % 5).mul(i + 1).remainder(11) + 1 for i in range(45 if split == "train" else 11)]
def collate(samples):
    return rnn.pad_sequence(samples, batch_first=True), torch.tensor([len(sample) for sample in samples])
def loss(model, batch):
    x, lengths = batch
    return F.cross_entropy(model(x, lengths)[:, :-1].flatten(0, 1), x[:, 1:].flatten(), ignore_index=0)
""",
    # Generator and discriminator in one step, by a reversed gradient and an optimizer around two others.
    "gan": """
class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, gradient): return -gradient
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.judge = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
    def forward(self, real, noise): return self.judge(real), self.judge(Reverse.apply(self.make(noise)))
class Both(torch.optim.Optimizer):
    def __init__(self, *parts):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
    def step(self, closure=None):
        for part in self.parts:
            part.step()
def model(params): return Pair()
def dataset(params, split):
    return [torch.tensor([i * 0.1, 1.0]).sin() for i in range(45)] if split == "train" else None
def optimizer(model, params):
    return Both(*(torch.optim.Adam(part.parameters(), lr=1e-2) for part in (model.make, model.judge)))
def loss(model, batch):
    real, made = model(batch, torch.randn(len(batch), 4))
    return F.softplus(-real).mean() + F.softplus(made).mean()
""",
    # A stream without a length, with noise in its items.
    "stream": """
class Lines(torch.utils.data.IterableDataset):
    def __iter__(self): return (torch.arange(8.0).mul(i + 1).sin() + 0.1 * torch.rand(8) for i in range(45))
def model(params): return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
def dataset(params, split): return Lines() if split == "train" else None
def loss(model, batch): return F.mse_loss(model(batch), batch)
""",
    # A queue of the last batches that grows.
    "queue": """
class Queue(nn.Linear):
    def forward(self, x):
        self.rows = torch.cat([self.rows, x.detach()])
        return super().forward(x)
def model(params):
    module = Queue(8, 8)
    module.register_buffer("rows", torch.zeros(0, 8))
    return module
def dataset(params, split): return [torch.arange(8.0) * i for i in range(45)] if split == "train" else None
def loss(model, batch): return F.mse_loss(model(batch), batch)
""",
    # Two own `train`: one merges weights in eval mode, as LoRA's does, and one keeps batch norm in eval mode.
    "modes": """
class Adapted(nn.Linear):
    def __init__(self):
        super().__init__(16, 3)
        self.weight.requires_grad_(False)
        self.a, self.b, self.merged = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.zeros(3, 2)), False
    def train(self, mode=True):
        if mode == self.merged:
            self.weight.data += (self.b @ self.a) * (-1 if mode else 1)
        self.merged = not mode
        return super().train(mode)
    def forward(self, x): return F.linear(x, self.weight if self.merged else self.weight + self.b @ self.a, self.bias)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), Adapted()
    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self
    def forward(self, x): return self.last(torch.relu(self.norm(self.first(x))))
def model(params): return Net()
def dataset(params, split):
    return [(torch.arange(8.0).mul(i + 1).sin(), i % 3) for i in range(45 if split == "train" else 11)]
def loss(model, batch): return F.cross_entropy(model(batch[0]), batch[1])
""",
    # A net with a frozen part, and nothing that changes its form: a test adds the change.
    "form": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.t, self.b = nn.Linear(8, 16), nn.Linear(8, 16).requires_grad_(False), nn.Linear(16, 3)
    def forward(self, x): return self.b(torch.relu(self.a(x) + self.t(x)))
def model(params): return Net()
def dataset(params, split):
    return [(torch.arange(8.0).mul(i + 1).sin(), i % 3) for i in range(45 if split == "train" else 11)]
def change(model, step): pass
def loss(model, batch, progress=None):
    if model.training and progress:
        change(model, progress.step)
    return F.cross_entropy(model(batch[0]), batch[1])
""",
    # Optimizers whose step needs a closure: LBFGS, or with `sam` sharpness-aware minimization; `subset`: of one bias.
    "closure": """
class SAM(torch.optim.SGD):
    def step(self, closure):
        super().step()
        return closure()
def model(params): return nn.Linear(8, 3)
def dataset(params, split):
    return [(torch.arange(8.0).mul(i).sin(), i % 3) for i in range(45)] if split == "train" else None
def optimizer(model, params):
    if params.get("subset"):
        return torch.optim.SGD([model.bias], 0.5)
    return SAM(model.parameters(), 0.1) if params.get("sam") else torch.optim.LBFGS(model.parameters())
def loss(model, batch): return F.cross_entropy(model(batch[0]), batch[1])
""",
}
