"""The live view of `cloudtrain watch`: a screen for a single job or a table of jobs, updated while they run."""
