"""The trainer under its public name: `python -m torch.distributed.run ... -m cloudtrain.entrypoints.train`."""

from .trainer.train import main

if __name__ == "__main__":
    main()
