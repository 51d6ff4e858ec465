"""Models of finished jobs: `source` finds a checkpoint, `exporting` starts the process that writes a model folder."""
