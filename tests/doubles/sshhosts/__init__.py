"""Real OpenSSH servers on hosts of their own, for the tests of what runs over ssh.

A host has network, name, processes, mounts, home, /tmp, /dev/shm and a small /data of its own; its power and its line
can be cut. `cluster.Cluster` starts some, `host.Host` is one; below them all is one process, `keeper`.
"""
