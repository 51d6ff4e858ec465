"""The live view of `cloudtrain watch`: what a terminal shows of one job or many while they run."""
