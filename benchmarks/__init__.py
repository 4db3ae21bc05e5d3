"""Measurements of Gossamer and of its peers."""
