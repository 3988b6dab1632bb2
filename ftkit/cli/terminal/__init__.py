"""Output on the terminal: tables, plans, progress, records, results."""
