"""HTML pages about runs: report.html and comparison.html."""
