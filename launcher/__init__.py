"""The code on the user's machine: config, plan, registry, submit, follow. Imports no concrete backend."""
