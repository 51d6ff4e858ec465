"""A clock of its own for each host: the machine's clock plus the host's seconds.

The kernel has namespaces for monotonic clocks only. So each program of a host loads a small library, which adds the
seconds of the file /opt/clock. Monotonic clocks and the times of files stay the machine's, as with a disk of a server.
Forks of a warm process (`warmnodes`) have not loaded the library. Needs a C compiler.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from doubles.sshhosts.cluster import Cluster
from doubles.sshhosts.host import Host

LIBRARY = """\
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static const long *moved;
int clock_gettime(clockid_t id, struct timespec *at) {
    int failed = syscall(SYS_clock_gettime, id, at);
    if (failed || id != CLOCK_REALTIME) return failed;
    if (!moved) {
        int file = open("/opt/clock", O_RDONLY);
        void *place = file < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        if (place == MAP_FAILED) return 0;
        moved = place;
    }
    at->tv_sec += *moved;
    return 0;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec, at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return at ? (*at = now.tv_sec) : now.tv_sec;
}
"""


def install(cluster: Cluster) -> None:
    """Give each host a clock, right at first; the hosts boot anew."""
    library = cluster.client_folder / "clock.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-x", "c", "-o", str(library), "-"]
    subprocess.run(command, input=LIBRARY, text=True, check=True)
    cluster.power_off()
    (cluster.root / "etc/ld.so.preload").write_text("/opt/clock.so\n")  # the folder is part of each host's /etc
    for host in cluster.hosts:
        shutil.copy(library, host.folder / "opt")
        _file(host).write_bytes(bytes(8))
    cluster.boot()


def move(host: Host, seconds: int) -> None:
    """Set the host's clock to so many seconds before or after the machine's clock."""
    with _file(host).open("r+b") as file:  # in place: each program has the file in its memory
        file.write(seconds.to_bytes(8, sys.byteorder, signed=True))


def _file(host: Host) -> Path:
    return host.folder / "opt/clock"
