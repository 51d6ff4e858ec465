"""A search over settings: the values of trials, the decision about the next segments, and packed sweeps."""
