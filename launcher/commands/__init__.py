"""One module for each command; `cloudtrain.launcher.cli` imports the module when the command is called."""
