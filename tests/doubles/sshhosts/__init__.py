"""Real OpenSSH servers on separate hosts, for the tests of code that runs over ssh.

Each host has its own network, name, processes, mounts, home folders, /tmp, /dev/shm and a small /data. Tests can cut
its power and its line. `cluster.Cluster` starts hosts, `host.Host` is one; all run below the process `keeper`.
"""
