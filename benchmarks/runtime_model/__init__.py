"""The runtime model against measurements: `python -m benchmarks.runtime_model --help`.

`paper.py` has the published figures and the paper's simulation, `__main__.py` the lab, and
`score.py` the errors of predictions.
"""
