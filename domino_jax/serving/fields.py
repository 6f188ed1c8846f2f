"""The fields of a request body, as tables: those that are supported, and those whose value may ask for nothing.

A client's defaults must not cost it every request, and nothing that would change the text may be ignored. So a field
that is not supported is accepted with the values that ask for nothing, and refused by its name with any other.
A table is a pair: {field: types of its value}, and {field: the values that ask for nothing, or ANY}.
"""

from collections.abc import Mapping
from typing import Any

from domino_jax.runtime.errors import quote

NUMBER, TEXTS = (int, float), (str, list)
ANY = object()  # every value: the field never changes the text

_LABELS = "user store metadata service_tier safety_identifier prompt_cache_key request_id priority".split()
_LABELS += "prompt_cache_retention prompt_cache_options cache_salt prediction parallel_tool_calls".split()
_TRUE = "skip_special_tokens spaces_between_special_tokens add_generation_prompt detokenize".split()
_TRUE += "include_reasoning separate_reasoning stream_reasoning".split()
_FALSE = "logprobs echo use_beam_search continue_final_message no_stop_trim include_stop_str_in_output".split()
_FALSE += "return_token_ids return_hidden_states return_tokens_as_token_ids".split()
# OpenAI's, vLLM's and SGLang's, with the defaults that clients send.
_NEUTRAL = {
    **dict.fromkeys(_LABELS, ANY),
    **dict.fromkeys(_TRUE, (True,)),
    **dict.fromkeys(_FALSE, (False,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs"), (0,)),
    **dict.fromkeys(("n", "best_of", "repetition_penalty", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("tools", "functions", "stop_token_ids", "bad_words"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),  # without tools
    **{"logit_bias": ({},), "modalities": (["text"],), "suffix": ("",), "verbosity": ("medium",)},
    "response_format": ({"type": "text"},),
}
_SUPPORTED = {
    **dict.fromkeys(("model", "mode"), str),
    **dict.fromkeys(("stream", "rounds", "drafts", "ignore_eos"), bool),
    **dict.fromkeys(("max_tokens", "min_tokens", "seed", "top_k"), int),
    **dict.fromkeys(("temperature", "top_p", "min_p"), NUMBER),
    **{"stream_options": dict, "stop": TEXTS},
}
_CHAT = {"messages": list, "max_completion_tokens": int, "chat_template_kwargs": dict}
CHAT = _SUPPORTED | _CHAT, _NEUTRAL | {"add_special_tokens": (False,)}
TEXT = _SUPPORTED | {"prompt": TEXTS}, _NEUTRAL | {"add_special_tokens": (True,)}
STREAM_OPTIONS = {"include_usage": bool, "continuous_usage_stats": bool}, {"include_obfuscation": ANY}
# Answers are sent back as they came. The chat template reads names and thoughts.
_MESSAGE = {"content": TEXTS, **dict.fromkeys(("role", "name", "reasoning_content", "reasoning"), str)}
MESSAGE = _MESSAGE, {"tool_calls": ([],), "annotations": ([],), "id": ANY}
PART = {"type": str, "text": str}, {"cache_control": ANY, "annotations": ([],)}


def read_fields(raw: Mapping[str, Any], table: tuple, problems: dict[str, str], within: str = "") -> dict[str, Any]:
    """The supported fields of an object; null is as if a field were absent, and 2.0 is the whole number 2.

    Args:
        problems: gets the fields that are refused, each with what is wrong.
        within: what their names begin with.
    """
    values, (supported, neutral) = {}, table
    for name, value in raw.items():
        if value is None:
            continue
        kinds = supported.get(name, ())
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if int in kinds and isinstance(value, float) and value.is_integer():
            value = int(value)
        if kinds and isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
            values[name] = value
        elif kinds:
            wanted = " or ".join(kind.__name__ for kind in kinds)
            problems[within + quote(name)[1:-1]] = f"it is {quote(value)}, expected {wanted}"
        elif not _asks_for_nothing(value, neutral.get(name, ())):
            known = f"{quote(value)} is not supported" if name in neutral else "it is not a field of this server"
            problems[within + quote(name)[1:-1]] = f"{known}; leave it out"
    return values


def _asks_for_nothing(value: Any, neutral: Any) -> bool:
    return neutral is ANY or any(
        value == default and isinstance(value, bool) == isinstance(default, bool) for default in neutral
    )
