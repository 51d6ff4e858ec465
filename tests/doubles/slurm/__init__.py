"""A real Slurm with accounting, on hosts in namespaces: `handle.Slurm` starts the site and makes its faults.

A login host, a controller and compute nodes with fake GPUs share the home folders. All daemons are Debian's packages.
"""
