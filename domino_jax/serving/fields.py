"""The fields of a request body, as tables: those that are supported, and those whose value may ask for nothing.

A client's defaults must not cost it every request, and nothing that would change the text may be ignored. So a field
that is not supported is accepted with the values that ask for nothing, and refused by its name with any other.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from domino_jax.runtime.errors import quote

NUMBER, TEXTS = (int, float), (str, list)
ANY = object()  # every value: the field never changes the text
MOST_NAMED = 20  # refused fields in one message


class Table(NamedTuple):
    """supported: {field: types of its value}.  neutral: {field: the values that ask for nothing, or ANY}."""

    supported: Mapping[str, Any]
    neutral: Mapping[str, Any]


_LABELS = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "request_id",
    "priority",
)
_LABELS += ("prompt_cache_retention", "prompt_cache_options", "cache_salt", "prediction", "parallel_tool_calls")
# OpenAI's, then those of vLLM and SGLang, with the defaults that their clients send.
_NEUTRAL = {
    **dict.fromkeys(_LABELS, ANY),
    **{name: (0,) for name in ("presence_penalty", "frequency_penalty", "top_logprobs")},
    **{name: (1,) for name in ("n", "best_of", "repetition_penalty", "length_penalty", "typical_p")},
    **{name: ([],) for name in ("tools", "functions", "stop_token_ids", "bad_words")},
    **{name: ("none", "auto") for name in ("tool_choice", "function_call")},  # without tools
    **{name: (True,) for name in ("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt")},
    **{name: (True,) for name in ("detokenize", "include_reasoning", "separate_reasoning", "stream_reasoning")},
    **{name: (False,) for name in ("logprobs", "echo", "use_beam_search", "continue_final_message", "no_stop_trim")},
    **{name: (False,) for name in ("include_stop_str_in_output", "return_token_ids", "return_hidden_states")},
    "return_tokens_as_token_ids": (False,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "verbosity": ("medium",),
}
_SUPPORTED = {
    **{name: str for name in ("model", "mode")},
    **{name: bool for name in ("stream", "rounds", "drafts", "ignore_eos")},
    **{name: int for name in ("max_tokens", "min_tokens", "seed", "top_k")},
    **{name: NUMBER for name in ("temperature", "top_p", "min_p")},
    "stream_options": dict,
    "stop": TEXTS,
}
_CHAT = {"messages": list, "max_completion_tokens": int, "chat_template_kwargs": dict}
CHAT = Table(_SUPPORTED | _CHAT, _NEUTRAL | {"add_special_tokens": (False,)})
TEXT = Table(_SUPPORTED | {"prompt": TEXTS}, _NEUTRAL | {"add_special_tokens": (True,)})
STREAM_OPTIONS = Table({"include_usage": bool, "continuous_usage_stats": bool}, {"include_obfuscation": ANY})
# As answers are sent back: name and thoughts go to the chat template, what only tools and sounds have is empty.
MESSAGE = Table(
    {"role": str, "content": TEXTS, "name": str, "reasoning_content": str, "reasoning": str},
    {**{name: ([],) for name in ("tool_calls", "annotations")}, "id": ANY},
)
PART = Table({"type": str, "text": str}, {"cache_control": ANY, "annotations": ([],)})


class Problems(dict[str, str]):
    """{field: what is wrong with it}, in order.

    param: the field of the body that the first one belongs to.
    """

    param: str | None = None

    def add(self, name: str, change: str, within: str = "") -> None:
        """within: the field that holds this one, if one does."""
        self.param = self.param or _shown(within.partition(".")[0] or name)
        self.setdefault(_shown(f"{within}.{name}" if within else name), change)

    def __str__(self) -> str:
        named = [f"{name}: {change}." for name, change in list(self.items())[:MOST_NAMED]]
        return " ".join([*named, *([f"And {len(self) - MOST_NAMED} more."] if len(self) > MOST_NAMED else [])])


def read_fields(raw: Mapping[str, Any], table: Table, problems: Problems, within: str = "") -> dict[str, Any]:
    """The supported fields of an object; null is as if a field were absent, and 2.0 is the whole number 2.

    Args:
        problems: gets the fields that are refused.
        within: the field that holds the object, if one does.
    """
    values = {}
    for name, value in raw.items():
        if value is None:
            continue
        kinds = table.supported.get(name, ())
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if int in kinds and isinstance(value, float) and value.is_integer():
            value = int(value)
        if not kinds and not _asks_for_nothing(value, table.neutral.get(name, ())):
            known = f"{quote(value)} is not supported" if name in table.neutral else "it is not a field of this server"
            problems.add(name, f"{known}; leave it out", within)
        elif kinds and not (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            problems.add(name, f"it is {quote(value)}, expected {wanted}", within)
        elif kinds:
            values[name] = value
    return values


def _asks_for_nothing(value: Any, neutral: Any) -> bool:
    return neutral is ANY or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _shown(name: str) -> str:
    return quote(name)[1:-1]
