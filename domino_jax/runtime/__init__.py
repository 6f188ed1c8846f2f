"""Errors, files, processes, signals and progress. Imports nothing else of the package."""
