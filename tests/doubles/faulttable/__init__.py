"""The fault table: a job that trains over ssh on hosts in namespaces, what befalls it, and what must come of it."""
