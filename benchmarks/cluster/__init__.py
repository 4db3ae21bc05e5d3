"""Training methods measured on a lab's slow links: `python -m benchmarks.cluster --help`.

`methods.py` is the table of what is measured, `worker.py` runs on each host, `run.py` starts
it on all of them, `report.py` turns samples into rows, `__main__.py` puts them together.
"""
