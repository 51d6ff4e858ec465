"""Export: a checkpoint of any strategy becomes a model folder, on a CPU, and the folder is proven in a new process.

    python -m cloudtrain.entrypoints.export < order.json

`build` writes the folder and its card, in a process without torch. `reference` builds the model from the task and the
checkpoint, and records its results. `check` opens the exported files in a third process and compares.
"""
