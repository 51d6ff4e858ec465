"""What a job may cost, has cost, and will: caps, the ledger, the meter, alerts; whole micro-dollars throughout."""
