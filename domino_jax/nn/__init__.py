"""Layers that the target and the drafter share."""
