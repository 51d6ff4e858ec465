"""Asynchronous training, `strategy: async`: workers pull weights from servers and push gradients, without waiting.

The rank process hosts a shard of the weights (on some ranks) and supervises a worker, a child process that computes.
So a worker may die, and training continues. See training.py for the rank process, worker.py for the child.
"""
