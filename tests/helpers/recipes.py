"""A recipe for tests of its checks."""

from configs import qwen3


def recipe():
    """A recipe that passes every check of train."""
    config = qwen3.get_config("Qwen/Qwen3-8B")
    config.data.train = "rows.jsonl"
    return config


def set_value(config, key, value):
    *sections, name = key.split(".")
    for section in sections:
        config = config[section]
    config[name] = value
