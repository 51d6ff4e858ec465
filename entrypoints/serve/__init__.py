"""An HTTP server for a model folder, by the standard library and torch.

    python -m cloudtrain.entrypoints.serve FOLDER --port 8080

`server` has connections and limits, `routes` the contracts of the platforms, `bodies` turns JSON into tensors and back,
`engine` has the model and its batches.
"""
