"""Models of finished jobs: exports and places.

`exporting` finds a checkpoint, and starts the process that writes a model folder. `push` brings a folder to
machines and buckets; `deployment` writes beside a folder what a vendor's own tools take.
"""
