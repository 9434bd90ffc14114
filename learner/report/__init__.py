"""Output of a run for people: log, live dashboard, summary, report."""
