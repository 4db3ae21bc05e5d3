"""What came out of an experiment: a page to look at, tables and figures as files.

``writing.write_report(folder)`` writes it, ``terminal.summary_table(analysis)`` says it on a
terminal. Both import plotly, polars and Jinja2, so nothing is imported here.
"""
