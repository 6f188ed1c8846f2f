"""Draft heads, one file each."""
