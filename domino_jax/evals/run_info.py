"""The description of a run in its report, besides the figures, and the values that distinguish two runs."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from domino_jax.decoding.settings import DecodeSettings
from domino_jax.evals.prompts import Prompt, fingerprint
from domino_jax.method.kinds import AnyConfig
from domino_jax.method.pair import Models
from domino_jax.weights.draft_vocab import copied_bytes
from domino_jax.weights.loading import LoadedTarget


@dataclasses.dataclass(frozen=True)
class PromptSource:
    """source: a path, "tasks", "--prompt" or "made up".  limit: rows read of a file, 0 or None for all."""

    source: str
    text: str | None = None
    limit: int | None = None
    tasks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """One run of decode. The first four fields are known before anything is loaded; `loaded` fills in the others.

    requested: the recipe's settings.  settings: those in effect, which fit its block.
    drafter: its path, the paths of a comparison, or None for plain decoding.
    """

    requested: DecodeSettings
    target: str
    drafter: str | tuple[str, ...] | None
    source: PromptSource
    settings: DecodeSettings | None = None
    drafter_name: str | None = None
    drafter_config: AnyConfig | None = None
    copied_bytes: int = 0  # of a draft vocabulary, in memory
    prompts: int = 0
    template: str | None = None
    stop_ids: tuple[int, ...] = ()

    def loaded(
        self,
        settings: DecodeSettings,
        target: LoadedTarget,
        prompts: Sequence[Prompt],
        models: Models | None,
        **drafter: str,
    ) -> "RunInfo":
        """With what loading showed; `drafter` (its path, drafter_name) is that of one drafter in a comparison."""
        drafting = models is not None and models.drafter is not None
        return dataclasses.replace(
            self,
            settings=settings,
            drafter_config=models.drafter.config if drafting else None,
            copied_bytes=copied_bytes(models.drafter_params) if drafting and settings.drafting.draft_vocab else 0,
            prompts=len(prompts),
            template=target.tokenizer.chat_template if target.tokenizer is not None else None,
            stop_ids=() if settings.ignore_eos else target.stop_ids,
            **drafter,
        )

    @property
    def simulated(self) -> float | None:
        """The acceptance length that is forced; None for a real run."""
        return self.requested.simulate_tau or None

    @property
    def round_widths(self) -> dict[str, int]:
        """By drafting mode, tokens that a round can emit at most."""
        return self.settings.round_widths(self.drafter_config) if self.drafter_config else {}

    @property
    def drafts_per_round(self) -> dict[str, int]:
        """By drafting mode, the drafts that a round verifies, at most."""
        config, settings = self.drafter_config, self.settings
        return {mode: settings.drafting_of(mode, config).verified(config) for mode in self.round_widths}

    def origin(self) -> dict[str, Any]:
        """JSON values by section: where everything comes from. A folder is continued or shown for these alone."""
        drafter = None
        if self.drafter is not None:
            several = isinstance(self.drafter, tuple)
            drafter = {"paths": list(self.drafter)} if several else {"path": self.drafter}
        return {
            "settings": self.requested.as_json(),
            "target": {"path": self.target},
            "drafter": drafter,
            "prompts": {**dataclasses.asdict(self.source), "tasks": list(self.source.tasks)},
        }

    def identity(self, prompts: Sequence[Prompt], models: Sequence[Models]) -> dict[str, Any]:
        """`origin` with fingerprints of prompts and drafters: what an interrupted run must be continued with."""
        origin = self.origin()
        drafters = [_weights_fingerprint(one.drafter_params) for one in models if one.drafter]
        return {
            **origin,
            "prompts": {**origin["prompts"], "sha256": fingerprint(prompts)},
            "stop_ids": list(self.stop_ids),
            "weights": {"drafters": drafters},
        }

    def as_json(self) -> dict[str, Any]:
        """The sections of report.json that hold no figures."""
        origin, widths = self.origin(), self.round_widths
        choices = self.drafter_config
        drafter = choices and {
            **origin["drafter"],
            **({"name": self.drafter_name} if self.drafter_name else {}),
            "head": choices.head,
            "block_size": choices.block_size,
            "shift_label": choices.shift_label if choices.has_backbone else None,
            "layers": choices.num_hidden_layers,
            "target_layer_ids": list(choices.target_layer_ids),
            "draft_vocab_bytes": self.copied_bytes,
        }
        return {
            **origin,
            "prompts": {**origin["prompts"], "count": self.prompts},
            "drafter": drafter,
            "simulated": self.simulated,
            "dtype": self.settings.dtype,
            "thinking": self.settings.thinking,
            "stop_ids": list(self.stop_ids),
            "template_sha256": hashlib.sha256(str(self.template).encode()).hexdigest() if self.template else None,
            "block_size": choices.block_size if choices else None,
            "round_widths": widths,
            "verify_width": max(widths.values(), default=1),
        }


def _weights_fingerprint(params: dict) -> str:
    """Tells trained drafters apart without reading all of them: every norm's weights move with every step."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        if leaf.ndim == 1:
            digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()
