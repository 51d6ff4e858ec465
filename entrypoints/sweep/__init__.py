"""A search over settings: the values of trials, the decision about the next segments, and its run in one job."""
