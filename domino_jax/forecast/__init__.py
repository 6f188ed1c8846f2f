"""The dry run: what a recipe needs on devices that are absent. Not needed to read the method."""
