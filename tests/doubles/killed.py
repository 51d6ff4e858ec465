"""A command that dies at a step, as by `kill -9`."""

# `cloudtrain ARGS`, killed at a step: the process dies before or after the call of `MODULE:NAME`. `handed over` dies
# when the starter has its orders and has not answered.
KILLED = """\
import importlib, os, signal, subprocess, sys

def die(): os.kill(os.getpid(), signal.SIGKILL)

def wrap(target, when):
    module, _, path = target.partition(":")
    *above, name = path.split(".")
    owner = importlib.import_module(module)
    for part in above: owner = getattr(owner, part)
    real = getattr(owner, name)
    def wrapped(*args, **kwargs):
        if when == "before": die()
        answer = real(*args, **kwargs)
        die()
    setattr(owner, name, wrapped)

def hand_over():
    real = subprocess.Popen.communicate
    def communicate(self, input=None, timeout=None):
        if input is None: return real(self, input, timeout)
        self.stdin.write(input); self.stdin.close(); die()
    subprocess.Popen.communicate = communicate

target, when, *sys.argv[1:] = sys.argv[1:]
hand_over() if when == "handed over" else wrap(target, when)
from cloudtrain.launcher.cli import main
main()
"""
