"""The shell around a user's script: steps from the output, the process group, callbacks of Trainers."""
