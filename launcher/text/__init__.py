"""Text for people and for terminals: units, times, tables, charts, colours, and the removal of control characters."""
