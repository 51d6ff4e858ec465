"""Lost answers of sbatch: a program of this name on the login host, before the real sbatch in the PATH of sessions."""

from typing import Literal

from doubles.sshhosts.host import Host

Kind = Literal["lost", "refused"]
KINDS = {
    "lost": "the job is in the queue, and the user reads only the client's words for a silent controller",
    "refused": "the request does not reach the controller",
}
_SOCKET = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
_FOLDER = "/var/tmp/sbatch"  # a file for each coming fault, with its kind in the name
_PROGRAM = f"""\
#!/bin/sh
case " $* " in
    *" --test-only "*) exec /usr/bin/sbatch "$@" ;;
esac
# Removing a file is atomic: each fault is for one call.
for fault in {_FOLDER}/*-*; do
    rm "$fault" 2>/dev/null || continue
    case $fault in
        *-lost) /usr/bin/sbatch "$@" >/dev/null 2>&1 ;;
    esac
    echo '{_SOCKET}' >&2
    exit 1
done
exec /usr/bin/sbatch "$@"
"""


def install(login: Host) -> None:
    """Write the program, and the folder of faults, which users may change."""
    program = login.bin / "sbatch"
    program.write_text(_PROGRAM)
    program.chmod(0o755)
    folder = login.folder / _FOLDER.lstrip("/")
    folder.mkdir()
    folder.chmod(0o777)


def lose(login: Host, count: int, kind: Kind) -> None:
    """Lose the answers of the next calls that make a job."""
    for number in range(count):
        (login.folder / _FOLDER.lstrip("/") / f"{number}-{kind}").touch()


def forget(login: Host) -> None:
    """Remove the faults that no call has met."""
    for fault in (login.folder / _FOLDER.lstrip("/")).iterdir():
        fault.unlink()
