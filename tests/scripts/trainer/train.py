"""A small language model with Hugging Face's Trainer, from a random start: without downloads.

torchrun --nproc-per-node 2 train.py --output_dir out --max_steps 200
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


def main():
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    start = torch.randint(128, (2048, 1), generator=torch.Generator().manual_seed(0))
    tokens = (start + torch.arange(64)) % 128
    data = [{"input_ids": line, "labels": line} for line in tokens]
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
