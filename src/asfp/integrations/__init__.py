"""Hooks into other people's loops; each only calls `pruner.step` at the right time."""
