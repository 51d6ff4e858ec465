"""The command line as on macOS, as far as Linux can play it: `python macos.py COMMAND ...`.

`sys.platform` is darwin; the names that Python has on Linux alone are gone from the standard library's modules, after
typeshed's conditions, as mypy ships them; /proc, /sys, /run and /dev/shm do not exist. The programs that the command
starts (ssh, git) are Linux's. Not played: a file system that ignores case, and Apple's own ssh, rsync and git.
"""

import ast
import importlib
import os
import selectors
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

HIDDEN = ("/proc", "/sys", "/run", "/dev/shm")
MODULES = ("os", "signal", "socket", "_socket", "select", "fcntl", "resource", "time", "mmap", "errno")


def linux_only() -> dict[str, set[str]]:
    """Return the names by module that Python has on Linux, and not on macOS."""
    spec = find_spec("mypy")
    assert spec is not None
    stubs = Path(str(spec.origin)).parent / "typeshed" / "stdlib"
    found = {}
    for name in MODULES:
        path = stubs / f"{name}.pyi"
        tree = ast.parse((path if path.is_file() else stubs / name / "__init__.pyi").read_text(encoding="utf-8"))
        found[name] = _names(tree.body, "linux") - _names(tree.body, "darwin")
    return found


def _names(body: list[ast.stmt], platform: str) -> set[str]:
    found: set[str] = set()
    asked = {"sys": SimpleNamespace(platform=platform, version_info=sys.version_info)}
    for node in body:
        if isinstance(node, ast.If):
            is_so = eval(compile(ast.Expression(node.test), "typeshed", "eval"), asked)
            found |= _names(node.body if is_so else node.orelse, platform)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id for each in targets if isinstance(each, ast.Name)}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {each.asname or each.name for each in node.names}
    return found


def become_mac() -> None:
    """Turn this process into one on macOS."""
    for name, gone in linux_only().items():
        module = importlib.import_module(name)
        for each in gone & set(vars(module)):
            delattr(module, each)
    importlib.reload(selectors)  # chooses its selector once, at its import
    proxies: Any = ModuleType("_scproxy")  # of the system's settings, which urllib reads on macOS
    proxies._get_proxies = proxies._get_proxy_settings = dict
    sys.modules["_scproxy"] = proxies
    sys.platform = "darwin"
    sys.addaudithook(_hide)  # sees each open, listdir and scandir
    for name in ("stat", "lstat", "access", "readlink", "statvfs"):
        setattr(os, name, _without_hidden(getattr(os, name)))


def _hide(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir"):
        _refuse(arguments[0])


def _refuse(path: Any) -> None:
    if isinstance(path, str | os.PathLike) and f"{os.fspath(path)}/".startswith(tuple(f"{each}/" for each in HIDDEN)):
        raise FileNotFoundError(2, "No such file or directory", os.fspath(path))


def _without_hidden(function: Any) -> Any:
    def call(path: Any, *arguments: Any, **more: Any) -> Any:
        _refuse(path)
        return function(path, *arguments, **more)

    return call


if __name__ == "__main__":
    become_mac()
    sys.path.pop(0)  # the folder of this file
    from cloudtrain.launcher.cli import main

    main()
