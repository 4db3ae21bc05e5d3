"""The report of an experiment: a page, and tables and figures as files.

``writing.write_report(folder)`` writes it. It needs plotly, polars and Jinja2, so this package
imports nothing.
"""
