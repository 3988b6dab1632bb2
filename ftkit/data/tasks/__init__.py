"""Tasks whose data ftkit generates and scores: text-to-SQL and malware analysis."""
