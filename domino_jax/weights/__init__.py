"""Hugging Face folders to parameters and back, for targets and drafters."""
