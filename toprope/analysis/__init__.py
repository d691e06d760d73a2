"""Pure functions over records: intervals, reports, plots."""
