"""Measured decoding runs: modes side by side, near ties, reports, tables and plots."""
