"""An HTTP server for a model folder, by uvicorn, starlette and torch.

    python -m cloudtrain.entrypoints.serve FOLDER --port 8080

`connections` has the limits of connections, also for the page of `cloudtrain ui`; `server` bounds a request, and drains
at the end; `routes` has the contracts of the platforms, and turns JSON into tensors and back; `engine` has the model
and its batches.
"""
