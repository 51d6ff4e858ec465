"""LoRA with peft, as a script: the digits network learns white paper with black ink from a few thousand parameters.

    cloudtrain submit -f examples/finetune/lora.yaml

The parent's weights are loaded before peft wraps the model, because peft changes the names. Only the adapter is saved.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from task import model
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cloudtrain.entrypoints.checkpoints import weights

STEPS, BATCH = 120, 32


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = model({"outputs": 10, "freeze": False})
    net.load_state_dict(weights.from_checkpoint(Path(os.environ["CLOUDTRAIN_INPUT_INIT_FROM"])))
    adapted = get_peft_model(net, LoraConfig(r=8, lora_alpha=16, target_modules=["7", "10"]))
    shared = DistributedDataParallel(adapted)
    digits = load_digits()
    images = 1 - torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(labels) // 5], order[len(labels) // 5 :]

    def accuracy():
        adapted.eval()
        with torch.no_grad():
            return (adapted(images[test]).argmax(1) == labels[test]).float().mean().item()

    if rank == 0:
        trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        print(f"{trained} of {sum(p.numel() for p in adapted.parameters())} parameters are trained")
        print(f"accuracy before {accuracy():.4f}", flush=True)
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=1e-2)
    for step in range(1, STEPS + 1):
        adapted.train()
        drawn = torch.Generator().manual_seed(step * ranks + rank)
        chosen = train[torch.randint(len(train), (BATCH,), generator=drawn)]
        loss = F.cross_entropy(shared(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}/{STEPS} loss {loss.item():.4f}", flush=True)
    if rank == 0:
        print(f"accuracy after {accuracy():.4f}")
        adapted.save_pretrained(Path(os.environ["CLOUDTRAIN_OUTPUT_DIR"]) / "adapter")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
