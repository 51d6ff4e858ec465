"""Models of finished jobs: exports, places, registries, endpoints.

`source` finds a checkpoint, `exporting` starts the process that writes a model folder. `push` brings a folder to
machines and buckets. `checked` reads a folder for `registering`, whose registries are the backends' and `mlflow`;
`exclusive` keeps two processes apart.
"""
