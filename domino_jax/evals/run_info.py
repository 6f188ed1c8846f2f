"""The description of a run in its report, besides the figures, and the values that distinguish two runs."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from domino_jax.decoding.prompts import Prompt
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.method.drafters import AnyConfig
from domino_jax.method.pair import Pair
from domino_jax.weights.draft_vocab import copied_bytes
from domino_jax.weights.loading import LoadedTarget


@dataclasses.dataclass(frozen=True)
class PromptSource:
    """source: a path, "tasks", "--prompt" or "made up".  limit: rows read of a file, 0 or None for all.

    sha256: prompts.digest_rows of the rows, once they are read.
    """

    source: str
    text: str | None = None
    limit: int | None = None
    tasks: tuple[str, ...] = ()
    sha256: str | None = None


@dataclasses.dataclass(frozen=True)
class RunDrafter:
    """A drafter of a run; models without one for plain decoding.

    settings: in effect, which fit its block.  identity: its path and drafter_identity, for the report.
    """

    models: Pair
    settings: DecodeSettings
    identity: Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """One run of decode. The first four fields are known before anything is loaded; `loaded` fills in the others.

    requested: the recipe's settings.  settings: those in effect, which fit the drafter's block.
    target, drafter: path and identity (weights/identity.py); lists of them in a comparison.
    """

    requested: DecodeSettings
    target: Mapping[str, Any]
    drafter: Mapping[str, Any] | None
    source: PromptSource
    settings: DecodeSettings | None = None
    drafter_name: str = ""
    drafter_config: AnyConfig | None = None
    copied_bytes: int = 0  # of a draft vocabulary
    prompts: int = 0
    template: str | None = None
    stop_ids: tuple[int, ...] = ()

    def loaded(self, name: str, drafter: RunDrafter, target: LoadedTarget, prompts: Sequence[Prompt]) -> "RunInfo":
        """For the report of one drafter, with what loading showed. name: empty where there is one drafter."""
        models, settings = drafter.models, drafter.settings
        copied = copied_bytes(models.drafter_params) if models.drafter and settings.drafting.draft_vocab else 0
        return dataclasses.replace(
            self,
            settings=settings,
            drafter=drafter.identity,
            drafter_name=name,
            drafter_config=models.drafter and models.drafter.config,
            copied_bytes=copied,
            prompts=len(prompts),
            template=target.tokenizer.chat_template if target.tokenizer is not None else None,
            stop_ids=() if settings.ignore_eos else target.stop_ids,
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
        """JSON values by section: what everything is made with. A folder is continued or shown for these alone."""
        return {
            "settings": self.requested.as_json(),
            "target": self.target,
            "drafter": self.drafter,
            "prompts": {**dataclasses.asdict(self.source), "tasks": list(self.source.tasks)},
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
            "shift_label": choices.shift_label,
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
