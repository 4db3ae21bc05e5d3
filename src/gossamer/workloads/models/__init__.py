"""Architectures, as published: parameter counts are tested."""
