"""Charts: one theme, and one way to write figures as a page or an image.

``theme`` has the colours, for CSS and for plotly; ``page`` writes pages that open offline. Reports,
plans and pictures of topologies use it.
"""
