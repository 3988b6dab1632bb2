"""Data that ftkit makes and scores: text-to-SQL and malware analysis."""
