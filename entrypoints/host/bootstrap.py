"""The first program on a host's Python: finds or receives our package, by its hash, and serves calls from the package.

Sent as text and run from memory. Any Python 3 must parse this file, to report a version too old for the package.
"""

import json
import os
import sys
from pathlib import Path

MARK = b"::cloudtrain::\n"  # all output before the mark was printed by the login's start-up files


def main() -> None:
    """Greet, and serve until the channel ends."""
    sys.stdout.buffer.write(MARK)
    sys.stdout.buffer.flush()
    ask = json.loads(sys.stdin.buffer.readline().decode())
    version = sys.version_info[:3]
    if version < (3, 10):
        _say(refused=f"its Python is {version[0]}.{version[1]}, and 3.10 or newer is needed: name one in ssh.python")
        return
    workdir = Path(os.path.abspath(Path(ask["workdir"]).expanduser()))  # noqa: PTH100 - links stay as they are
    folder = workdir / "runtime" / ask["sha256"]
    umask = os.umask(0o077)  # the user's own umask is for the files of a job
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for place in (workdir, folder.parent):  # code in these folders is run
            status = place.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                _say(refused=f"others may write to its folder {place}: `chmod go-w {place}`, or set ssh.workdir")
                return
        if not folder.is_dir():
            _take_in(folder)
        os.utime(str(folder))  # in use: packages unused for long are removed
    except OSError as error:
        _say(refused=f"its folder {workdir} cannot be used: {error.strerror or error}; set ssh.workdir")
        return
    sys.path.insert(0, str(folder))
    try:
        from cloudtrain.entrypoints.host import calls  # this text has no package
    except Exception:  # after a power cut the package's files may be empty: the next call sends the package again
        folder.rename(folder.with_name(f"{folder.name}.{os.getpid()}.part"))
        raise

    calls.serve(str(workdir), str(folder), umask)


def _take_in(folder: Path) -> None:
    import shutil  # with zlib, 5 ms that a host with the package saves
    import zlib

    _say(need=True)
    packed = sys.stdin.buffer.read(int(sys.stdin.buffer.readline()))
    partial = folder.with_name(f"{folder.name}.{os.uname().nodename}-{os.getpid()}.part")
    for name, text in json.loads(zlib.decompress(packed).decode()).items():
        path = partial / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    try:
        partial.rename(folder)
    except OSError:  # another channel was faster
        shutil.rmtree(str(partial), ignore_errors=True)
        if not folder.is_dir():
            raise


def _say(**answer: object) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
