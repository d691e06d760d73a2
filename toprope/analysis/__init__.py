"""Pure functions over records: statistics, findings, reports and plots."""
