"""The state on this machine: the home folder, the database, the registry of jobs, the ledger of budgets, the curves."""
