"""The fault table: a job that trains over ssh on hosts in namespaces, the faults, and the required outcomes."""
