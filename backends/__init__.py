"""One folder a backend, the same file names in each; found by name through `cloudtrain.launcher.backend`."""
