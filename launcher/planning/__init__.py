"""From a config to a request: the plan, the shipped code, the rendered request, and the checks of each."""
