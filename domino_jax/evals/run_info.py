"""The description of a run in its report, besides the figures, and the values that distinguish two runs."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from domino_jax.decoding.prompts import Prompt
from domino_jax.decoding.requests import with_defaults
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.method.pair import Pair
from domino_jax.weights.loading import LoadedTarget


@dataclasses.dataclass(frozen=True)
class PromptSource:
    """source: a path, "tasks" or "--prompt".  limit: rows read of a file, 0 or None for all.

    sha256: prompts.digest_rows of the rows, once they are read.
    """

    source: str
    text: str | None = None
    limit: int | None = None
    tasks: tuple[str, ...] = ()
    sha256: str | None = None


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """The origin of a decoding: settings, models and prompts.

    requested: the recipe's settings.  target, drafter: path and identity (weights/identity.py).
    """

    requested: DecodeSettings
    target: Mapping[str, Any]
    drafter: Mapping[str, Any] | None
    source: PromptSource

    def origin(self) -> dict[str, Any]:
        """The values that decide what is decoded, by section; paths and file names do not count."""
        models = {"target": {**self.target}, "drafter": {**(self.drafter or {})}}
        for model in models.values():
            model.pop("path", None)
        return {"settings": self.requested.as_json(), **models, "prompts": {"sha256": self.source.sha256}}

    def as_json(
        self, target: LoadedTarget, models: Pair, settings: DecodeSettings, prompts: Sequence[Prompt]
    ) -> dict[str, Any]:
        """The sections of report.json that hold no figures. settings: in effect."""
        config = models.drafter and models.drafter.config
        widths = settings.round_widths(config) if config else {}
        template = target.tokenizer.chat_template if target.tokenizer is not None else None
        sampled = (with_defaults(prompt.request, settings).sampling for prompt in prompts)
        temperatures = sorted({params.temperature for params in sampled})
        drafter = config and {
            **self.drafter,
            "head": config.head,
            "block_size": config.block_size,
            "shift_label": config.shift_label,
            "layers": config.num_hidden_layers,
            "target_layer_ids": list(config.target_layer_ids),
        }
        return {
            "settings": self.requested.as_json(),
            "target": self.target,
            "drafter": drafter,
            "prompts": {
                **dataclasses.asdict(self.source),
                "tasks": list(self.source.tasks),
                "count": len(prompts),
                "temperatures": temperatures,
            },
            "dtype": settings.dtype,
            "thinking": settings.thinking,
            "stop_ids": list(target.stop_ids),
            "template_sha256": hashlib.sha256(str(template).encode()).hexdigest() if template else None,
            "batch_size": settings.batch_size,
            "round_widths": widths,
            "verify_width": max(widths.values(), default=1),
        }
