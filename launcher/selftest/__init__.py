"""A proof on the user's own machines: two small jobs go through the whole life, and each step is compared."""
