"""How a model is spread over the ranks.

ddp: a copy each; fsdp: a shard each; hsdp: shards within, copies between; local: a copy each, averaged now and then;
async: a copy each, which servers train.

A strategy is a record of functions (strategy.py), created by one function for each strategy; the training loop uses
only the record. A new strategy is a file beside ddp.py, a row in facts.py, and a line in STRATEGIES (wrap.py). Here is
no import, because the launcher reads facts.py without torch.
"""
