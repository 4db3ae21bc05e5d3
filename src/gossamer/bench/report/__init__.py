"""What came out of an experiment: a page to look at, tables and figures as files."""
