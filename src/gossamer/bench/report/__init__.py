"""What came out of an experiment: a page to look at, tables and figures as files.

``writing.write_report(folder)`` writes it. It imports plotly, polars and Jinja2, so nothing is
imported here.
"""
