# /// script
# dependencies = ["trl", "peft"]
# ///
"""Supervised fine-tuning with TRL, of a random model and a tokenizer trained by the script: without downloads.

torchrun --nproc-per-node 2 train.py --output_dir out --max_steps 200
"""

from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer, TrlParser

END = "<|endoftext|>"


def main():
    (arguments,) = TrlParser(SFTConfig).parse_args_and_config()
    lines = Path(__file__).read_text().splitlines() * 20
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=300, special_tokens=[END]))
    trainer = SFTTrainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2)),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": [line for line in lines if line.strip()]}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END),
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
