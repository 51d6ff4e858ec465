"""Channels to hosts, over ssh or in a process of this machine: calls, connections, the transfer of files."""
