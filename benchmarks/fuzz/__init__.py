"""Malformed inputs for all code that reads user input: see ``__main__``.

``inputs`` has the strategies, ``kinds`` the code under test, ``hunt`` the search for failures.
"""
