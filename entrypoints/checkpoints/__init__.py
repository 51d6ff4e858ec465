"""Checkpoints: complete or absent, known to be intact before anything trusts them, written while training goes on.

    step-00000120.tmp/ -> one shard a rank, plain.pt, trainer.json -> manifest.json (size and crc32 of each) -> fsync
    -> rename to step-00000120/ -> fsync of the folder -> only then retention

`folder` holds the steps of a job, `shards` is one rank's file, `layout` says what goes into it, `saver` writes in the
background, `loader` reads into live tensors on any number of ranks, `weights` exports, `mirror` copies elsewhere.
"""
