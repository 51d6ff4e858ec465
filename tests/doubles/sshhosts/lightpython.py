"""A real interpreter for hosts, but with a script in place of torchrun, which saves the seconds of torch's import."""

from __future__ import annotations

import sys
from pathlib import Path

from doubles.sshhosts.host import Host

PATH = "/opt/light/bin/python"  # on each host
# Python runs the file at its start. Each node has one process of the job, with the node's number as its rank.
SITE = """\
import sys
if "cloudtrain.entrypoints.agent.elastic" in sys.orig_argv:
    import os, pathlib, signal
    from cloudtrain.entrypoints import processes
    processes.die_with_parent()  # as torchrun; holds after exec, too
    os.environ["RANK"] = os.environ["CLOUDTRAIN_NODE_RANK"]
    os.environ["WORLD_SIZE"] = os.environ["CLOUDTRAIN_NUM_NODES"]
    for rank in ("met-0", "met-1"):  # as if all ranks had joined a process group
        (pathlib.Path(os.environ["CLOUDTRAIN_RESULT_DIR"]) / rank).touch()
    os.chdir(os.environ["CLOUDTRAIN_CODE_DIR"])
    os.execv(sys.executable, [sys.executable, "-u", "-c", {program!r}])
"""


def install(host: Host, program: str | None = None) -> str:
    """Write the interpreter to the host, with `program` as torchrun (None: the code's train.py); return its path."""
    folder = host.folder / "opt/light"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    site.mkdir(parents=True, exist_ok=True)
    (folder / "bin").mkdir(exist_ok=True)
    base = Path(sys.base_prefix) / "bin" / version
    if not (folder / "bin/python").is_symlink():
        (folder / "bin/python").symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    (site / "torch").mkdir(exist_ok=True)  # programs look for the folder, and never import the module
    (site / "torch/__init__.py").write_text("raise ImportError('a stand-in')\n")
    (site / "torch/version.py").write_text("__version__ = '2.13.0+cu128'\ncuda = '12.8'\n")
    (site / "torch-2.13.0.dist-info").mkdir(exist_ok=True)
    program = "exec(compile(open('train.py').read(), 'train.py', 'exec'))" if program is None else program
    (site / "light.py").write_text(SITE.format(program=program))
    (site / "light.pth").write_text("import light\n")  # a distribution's interpreter has a sitecustomize of its own
    return PATH
