"""Budgets and costs in whole micro-dollars: caps, ledgers, the meter, bills, forecasts and alerts."""
