"""Inputs that nobody would write, for whatever reads what users write: see ``__main__``.

``inputs`` has the strategies, ``kinds`` what is done with each, ``hunt`` how failures are found.
"""
