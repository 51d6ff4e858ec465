"""What the user's machine does: config, plan, registry, submit, follow. Knows no concrete backend."""
