"""What a run tells people: log, live dashboard, summary, report."""
