"""One file a command; `cloudtrain.launcher.cli` imports a command's module when the command is called."""
