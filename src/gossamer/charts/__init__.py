"""Charts: one theme, and one way in which figures become a page or an image.

``theme`` has the colours, for CSS and for plotly; ``page`` writes pages that open offline. The
report, a plan and a topology's picture are pages of it.
"""
