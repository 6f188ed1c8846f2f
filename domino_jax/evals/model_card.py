"""README.md of an exported drafter, from the template model_card.md: origin, training, measurements, commands."""

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from domino_jax.evals.report import versions
from domino_jax.evals.tables import rows_of, width_note
from domino_jax.method.drafters import AnyConfig
from domino_jax.weights import servers

TRAINING_PACKAGES = ("optax", "orbax-checkpoint", "grain")
MEASURED = ("τ pooled", "τ per prompt", "speed-up", "outputs identical")  # rows of the card's table
TEMPLATE = Path(__file__).with_name("model_card.md")


def model_card(
    config: AnyConfig,
    weights: int,
    dtype: str,
    recipe: Mapping[str, Any],
    step: int,
    *,
    report: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    tau: float | None = None,
) -> str:
    """The card's text. The arguments have the names of export.write_export; weights counts parameters."""
    path = recipe["target"]["path"]
    target = public_name(path)
    settings = {**recipe["train"], **recipe["drafter"].get(config.head, {})}
    packages = {**versions(), **{name: importlib.metadata.version(name) for name in TRAINING_PACKAGES}}
    front = ModelCardData(
        base_model=servers.hub_id(path),  # none for a local folder: Hugging Face links it to a model of the hub
        library_name="domino_jax",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", config.title.lower()],
        license="other",
    )
    card = ModelCard.from_template(
        front,
        template_path=str(TEMPLATE),
        **{"target": target, "config": config, "weights": weights, "dtype": dtype},
        **{"recipe": recipe, "step": step, "data": data, "tau": tau, "report": report},
        place="pack" if recipe["data"]["layout"] == "pack" else "row",
        source=Path(recipe["data"]["train"]).name,
        settings={key: public_value(value) for key, value in settings.items() if value is not None},
        figures=rows_of(report, spread=False, labels=MEASURED) if report else [],
        width=width_note(report) if report and report["drafter"] else "",
        names=servers.SERVERS.get(config.head),
        sglang_refusal=servers.server_refusals(config)[0],
        vllm_refusal=servers.server_refusals(config)[1],
        served_drafts=servers.served_drafts(config),
        packages=", ".join(f"{name} {version}" for name, version in packages.items()),
    )
    return str(card).rstrip() + "\n"


def public_value(value: Any) -> Any:
    """A value of the recipe without the folders of this machine."""
    if isinstance(value, Mapping):
        return {key: public_value(part) for key, part in value.items()}
    return public_name(value) if isinstance(value, str) else value


def public_name(path: str) -> str:
    """A hub id, or the last part of a path: local folders and buckets are not published."""
    return servers.hub_id(path) or Path(path).name
