"""From a recipe's paths to models that decode, on one device or on a mesh."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from domino_jax.decoding.settings import BASELINE, DecodeSettings, refused_mode
from domino_jax.method.drafters import AnyConfig
from domino_jax.method.pair import Pair
from domino_jax.models import sharding
from domino_jax.runtime.distributed import say
from domino_jax.runtime.errors import DominoError
from domino_jax.weights.loading import LoadedTarget, load_models, load_target
from domino_jax.weights.target import read_target_config


def decode_mesh(data: int, tensor: int, batch_size: int, key: str = "decode.batch_size") -> Mesh | None:
    """The mesh to decode on; None for one device. -1 is the rest of the devices. key: the name of batch_size.

    DominoError: more devices than are here, rows that cannot be cut evenly, or processes left without work.
    """
    if (data, tensor) == (1, 1) and jax.process_count() == 1:
        return None
    here = len(jax.devices())
    known = max(data, 1) * max(tensor, 1)
    wanted = here // known * known if -1 in (data, tensor) else known
    if not 0 < wanted <= here or (jax.process_count() > 1 and wanted != here):
        raise DominoError(
            f"decode.mesh.data={data} and decode.mesh.tensor={tensor} ask for {known} devices, but {here} are here in"
            f" {jax.process_count()} process(es); change the sizes (-1 is the rest)."
        )
    mesh = sharding.make_mesh(data, 1, tensor, devices=jax.devices()[:wanted])
    if batch_size % mesh.shape["data"]:
        raise DominoError(
            f"{key} {batch_size} cannot be cut into decode.mesh.data = {mesh.shape['data']} parts; make it a multiple."
        )
    return mesh


def needs_drafter(modes: Sequence[str]) -> bool:
    return any(mode != BASELINE for mode in modes)


def refuse_other_head(head: str, named: str | None, path: str) -> None:
    """Refuses a folder whose drafter has another head than the one that the command line names."""
    if named not in (None, head):
        raise DominoError(
            f"config.drafter.head is {named!r}, but the drafter in {path} has the head {head!r}; leave the key out, or"
            " name another drafter."
        )


def lower_to_drafter(
    settings: DecodeSettings, drafter: AnyConfig, report: Callable[[str], None] = say
) -> DecodeSettings:
    """Settings that the drafter's block allows; `report` takes a note for each value that is lowered."""

    def at_most(key: str, value: int, most: int, reason: str) -> int:
        if value > most:
            report(f"note: config.{key} is {value}, but {reason}: lowered to {most}.")
        return min(value, most)

    most = drafter.most_drafts
    reason = f"this drafter's block of {drafter.block_size} gives at most {most} drafts"
    if not drafter.has_backbone:
        reason = f"this drafter makes at most {most} drafts"
    if settings.drafting.num_drafts is not None:
        settings = settings.change(num_drafts=at_most("decode.num_drafts", settings.drafting.num_drafts, most, reason))
    if tree := settings.drafting.tree:
        tree = dataclasses.replace(tree, depth=at_most("decode.tree.depth", tree.depth, most, reason))
        deepest = settings.change(tree=tree).drafting.width(drafter)
        reason = f"{tree.lanes} lanes of depth {deepest} and the anchor are {tree.lanes * deepest + 1}"
        nodes = at_most("decode.tree.nodes", tree.nodes, tree.lanes * deepest + 1, reason)
        settings = settings.change(tree=dataclasses.replace(tree, nodes=nodes))
    return settings


@dataclasses.dataclass(frozen=True)
class Loader:
    """Reads targets and drafters as the settings describe them.

    target_path: a folder or hub id.  mesh: where the weights go, this process' first device when None.
    head: which a drafter's folder must have; None: any.  quantize: of the target (loading.load_target).
    """

    target_path: str
    settings: DecodeSettings
    mesh: Mesh | None
    head: str | None = None
    quantize: str | None = None

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """Within it, what is computed is on the mesh."""
        return jax.set_mesh(self.mesh) if self.mesh else contextlib.nullcontext()

    def target(self) -> LoadedTarget:
        return load_target(self.target_path, self.settings.dtype, self._place(), self.quantize)

    def models(self, loaded: LoadedTarget, drafter_path: str | None, modes: Sequence[str]) -> Pair:
        """The target with the drafter that `modes` need."""
        if not needs_drafter(modes):
            return load_models(loaded, None)
        if not drafter_path:
            raise DominoError(
                f"decode.modes {', '.join(modes)} need a drafter, and none is named: set --config.drafter.path=FOLDER,"
                f" or decode without one: --config.decode.modes=\"('{BASELINE}',)\"."
            )
        models = load_models(loaded, drafter_path, self._place(), self.settings.drafting)
        drafter = models.drafter.config
        refuse_other_head(drafter.head, self.head, drafter_path)
        if refused := next(filter(None, (refused_mode(mode, drafter) for mode in modes)), None):
            raise DominoError(f"decode.modes has a mode that this drafter lacks: {refused}.")
        return models

    def _place(self):
        if self.mesh is None:
            return None
        config = read_target_config(self.target_path)
        tied = config.tie_word_embeddings
        return sharding.decode_placement(self.mesh, config.num_key_value_heads, tied)
