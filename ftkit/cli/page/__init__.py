"""report.html: what a browser shows of a run."""
