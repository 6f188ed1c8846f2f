"""Flags and recipes to checked values and the objects of a run."""
