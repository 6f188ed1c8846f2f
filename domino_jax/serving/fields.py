"""The fields of a request body. A field that would change the answer is supported or refused, and any other one passes.

A client's defaults must not cost it every request. So a field of another server that would change the answer is refused
only with a value that asks for something: 0, "", [], {} and false ask for nothing, unless `CHANGES` has other values.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from domino_jax.runtime.errors import quote

NUMBER, TEXTS = (int, float), (str, list)
_SUPPORTED = {
    **dict.fromkeys(("model", "mode", "reasoning_effort"), str),
    **dict.fromkeys(("stream", "rounds", "ignore_eos", "return_token_ids"), bool),
    **dict.fromkeys(("max_tokens", "min_tokens", "seed", "top_k"), int),
    **dict.fromkeys(("temperature", "top_p", "min_p"), NUMBER),
    **{"stream_options": dict, "stop": TEXTS},
}
CHAT = _SUPPORTED | {"messages": list, "max_completion_tokens": int, "chat_template_kwargs": dict}
TEXT = _SUPPORTED | {"prompt": TEXTS}
STREAM_OPTIONS = {"include_usage": bool, "continuous_usage_stats": bool}
# Answers are sent back as they came. The chat template reads names and thoughts.
MESSAGE = {"content": TEXTS, **dict.fromkeys(("role", "name", "reasoning_content", "reasoning"), str)}
PART = {"type": str, "text": str}

_OFF = "top_logprobs logprob_token_ids n_probs echo return_hidden_states return_prompt_text"
_OFF += " return_tokens_as_token_ids return_tokens use_beam_search continue_final_message no_stop_trim documents"
_OFF += " include_stop_str_in_output presence_penalty frequency_penalty logit_bias tools functions web_search_options"
_OFF += " stop_token_ids stop_regex bad_words allowed_token_ids suffix audio lora lora_path watermarking chat_template"
_OFF += " grammar json_schema regex ebnf structured_outputs structural_tag guided_json guided_regex guided_choice"
_OFF += " guided_grammar dry_multiplier xtc_probability mirostat dynatemp_range min_keep n_keep n_indent"
_OFF += " t_max_predict_ms thinking_token_budget repetition_detection prompt_embeds custom_logit_processor"
_OFF += " max_new_tokens tool_calls tool_call_id"
_SAMPLERS = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
# Unsupported fields of OpenAI, vLLM, SGLang and llama.cpp, each with the values that ask for nothing.
CHANGES = {
    **dict.fromkeys(_OFF.split(), (False, 0, "", [], {})),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), (False,)),  # 0 asks for those of the chosen tokens
    **dict.fromkeys("skip_special_tokens spaces_between_special_tokens add_generation_prompt".split(), (True,)),
    **dict.fromkeys("n n_cmpl best_of repetition_penalty repeat_penalty length_penalty typical_p".split(), (1,)),
    **dict.fromkeys(("n_predict", "truncate_prompt_tokens", "top_n_sigma", "adaptive_target"), (-1,)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),  # without tools
    **{"modalities": (["text"],), "verbosity": ("medium",), "response_format": ({"type": "text"},)},
    "samplers": ([], _SAMPLERS),
}
CHAT_CHANGES = CHANGES | {"add_special_tokens": (False,)}
TEXT_CHANGES = CHANGES | {"add_special_tokens": (True,)}
ALIKE = 0.85  # of two names of which one is taken for the other with a typing error


def read_fields(
    raw: Mapping[str, Any],
    supported: Mapping[str, Any],
    problems: dict[str, str],
    changes: Mapping[str, tuple] = CHANGES,
    within: str = "",
) -> dict[str, Any]:
    """The supported fields of an object; null is as if a field were absent, and 2.0 is the whole number 2.

    Args:
        supported: {field: types of its value}.
        problems: gets the fields that are refused, each with what is wrong.
        within: what their names begin with.
    """
    values = {}
    for name, value in raw.items():
        if value is None:
            continue
        kinds = supported.get(name, ())
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if int in kinds and isinstance(value, float) and value.is_integer():
            value = int(value)
        if kinds and isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
            values[name] = value
        elif problem := _problem(name, value, kinds, changes, supported):
            problems[within + quote(name)[1:-1]] = problem
    return values


def _problem(name: str, value: Any, kinds: tuple, changes: Mapping[str, tuple], supported: Mapping) -> str | None:
    if kinds:
        return f"it is {quote(value)}, expected {' or '.join(kind.__name__ for kind in kinds)}"
    if name in changes:
        alike = (value == other and isinstance(value, bool) == isinstance(other, bool) for other in changes[name])
        return None if any(alike) else f"{quote(value)} is not supported; leave it out"
    alike = difflib.get_close_matches(name, supported, 1, ALIKE)
    return f"this server has no such field; it has {alike[0]}" if alike and value else None
