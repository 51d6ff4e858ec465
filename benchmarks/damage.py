"""Damage a job's newest checkpoint in so many ways, one after the other, and see that the older one is taken.

python damage.py CHECKPOINTS COUNT      prints {"damaged": N, "found": N}
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

import torch.distributed as dist

from cloudtrain.entrypoints.checkpoints import loader
from cloudtrain.entrypoints.trainer import resume


def main() -> None:
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    chance = random.Random(2)
    newest, older, *_ = resume.choose(folder, "auto", is_first=True, job="")
    copy = folder.parent / "copy"
    shutil.copytree(newest, copy)
    found = 0
    for _ in range(count):
        damage(chance.choice(sorted(newest.iterdir())), chance)
        said = loader.check(newest)
        found += bool(said) and "\n" not in str(said) and loader.check(older) is None
        shutil.rmtree(newest)
        shutil.copytree(copy, newest)
    assert loader.check(newest) is None
    print(json.dumps({"damaged": count, "found": found}))


def damage(file: Path, chance: random.Random) -> None:
    whole = file.read_bytes()
    kind = chance.choice(["flip", "flip", "cut", "gone"])
    if kind == "flip":
        flipped = bytearray(whole)
        flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        file.write_bytes(flipped)
    elif kind == "cut":
        file.write_bytes(whole[: chance.randrange(len(whole))])
    else:
        file.unlink()


if __name__ == "__main__":
    main()
