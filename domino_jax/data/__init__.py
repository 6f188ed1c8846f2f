"""Prompts and training rows: reading, chat templates, batches."""
