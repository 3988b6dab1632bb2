"""What the terminal shows: tables, plans, progress, records, reports."""
