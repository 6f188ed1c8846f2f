"""Losses, the jitted training step, checkpoints, metrics and what a run needs of a device."""
