"""Checkpoints: complete or absent, verified before use, written while training continues.

    step-00000120.tmp/ -> one shard a rank, plain.pt, trainer.json -> manifest.json (size and crc32 of each) -> fsync
    -> rename to step-00000120/ -> fsync of the folder -> only then retention

`folder` holds the steps of a job, `shards` is one rank's file, `layout` assigns tensors to the files, `saver` writes in
the background, `loader` reads into live tensors on any number of ranks, `weights` exports, `mirror` copies to a store.
"""
