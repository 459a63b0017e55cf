"""Checkpoints of other libraries in and out. No converter exists yet."""
