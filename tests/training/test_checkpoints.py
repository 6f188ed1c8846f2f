"""checkpoints.py: what is saved comes back bit for bit, the right ones stay, a changed recipe is refused by field."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.recipe.loading import fixed_keys, load_recipe
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.training import manifest
from domino_jax.training.checkpoints import Checkpoints, refuse_changes

META = {"config": {"train": {"steps": 5}}}


def state_of(step):
    key = jax.random.key(step)
    return {
        "params": {"fc": {"kernel": jax.random.normal(key, (3, 4))}, "norm": jnp.ones(4, jnp.bfloat16) * step},
        "opt_state": (jnp.int32(step), [jnp.zeros((2,))]),
        "step": jnp.int32(step),
    }


ANSWERS = "these answers"  # that every τ here is measured with
ABSTRACT = jax.eval_shape(lambda: state_of(0))


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.fixture
def saved(tmp_path):
    """A workdir with the steps 1 to 4 saved, three of them kept."""
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, state_of(step), {"next_index": 10 * step}, META)
    return tmp_path


def test_the_newest_comes_back_bit_for_bit_with_its_data_position_and_recipe(saved):
    with Checkpoints(saved, keep=3) as checkpoints:
        step, state, data_state, meta = checkpoints.restore_latest(ABSTRACT)
    assert (step, data_state, meta) == (4, {"next_index": 40}, META)
    assert_same_bits(state, state_of(4))


def test_the_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    bump = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        state = {"w": jnp.arange(50_000, dtype=jnp.float32)}
        expected = np.array(state["w"])
        checkpoints.save(1, state, {}, {})
        for _ in range(5):
            state = bump(state)
        restored = checkpoints.restore_latest(jax.eval_shape(lambda: state)).state
    np.testing.assert_array_equal(restored["w"], expected)


def test_a_state_of_another_shape_is_refused(saved):
    other = {**ABSTRACT, "params": {**ABSTRACT["params"], "norm": jax.ShapeDtypeStruct((5,), jnp.bfloat16)}}
    with Checkpoints(saved, keep=3) as checkpoints, pytest.raises(DataError, match="cannot be read here"):
        checkpoints.restore_latest(other)


@pytest.mark.parametrize(
    ("keep", "taus", "stay"),
    [(2, {}, [5, 6]), (2, {1: 3.0, 2: 3.5, 4: 3.4}, [2, 5, 6]), (1, {2: 3.0, 3: 3.0}, [3, 6])],
    ids=["newest", "best", "later of equals"],
)
def test_retention_leaves_exactly_the_expected_steps(tmp_path, keep, taus, stay):
    """The best is marked while later steps come, as evaluations are."""
    state = {"w": jnp.zeros(2)}
    with Checkpoints(tmp_path, keep=keep) as checkpoints:
        for step in range(1, 7):
            if step in taus:
                checkpoints.mark_tau(step, taus[step], ANSWERS)
            checkpoints.save(step, state, {}, {})
        checkpoints.wait()
        assert checkpoints.folders.finished() == stay
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {*map(str, stay), *(["tau.json"] if taus else [])}


def test_a_tau_competes_only_with_those_that_were_measured_like_it(tmp_path):
    state = {"w": jnp.zeros(2)}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step, tau, answers in ((1, 6.0, ANSWERS), (2, 3.0, "others"), (3, 2.0, "others")):
            checkpoints.mark_tau(step, tau, answers)
            checkpoints.save(step, state, {}, {})
            assert checkpoints.best() == ((1, 6.0) if step == 1 else (2, 3.0))
    with Checkpoints(tmp_path, keep=1) as checkpoints:  # and after a restart
        assert checkpoints.best() == (2, 3.0)
        checkpoints.mark_tau(4, 2.5, "others")
        checkpoints.save(4, state, {}, {})
        checkpoints.wait()
        assert checkpoints.folders.finished() == [2, 4]


def test_an_old_step_goes_only_after_the_manifest_of_the_newer(tmp_path, monkeypatch):
    state, write = {"w": jnp.zeros(2)}, manifest.write
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {}, {})
        checkpoints.wait()

        def looks(folder, step):
            assert (tmp_path / "checkpoints" / "1" / "manifest.json").exists()
            write(folder, step)

        monkeypatch.setattr(manifest, "write", looks)
        checkpoints.save(2, state, {}, {})
        checkpoints.wait()
        assert checkpoints.folders.finished() == [2]


OLD = {"seed": 1, "train": {"steps": 10, "gamma": 7.0}, "decode": {"seed": 0}, "data": {"thinking": False}}


def test_a_changed_recipe_is_refused_field_by_field_unless_allowed():
    new = {**OLD, "train": {"steps": 20, "gamma": 4.0}, "decode": {"seed": 5}}
    with pytest.raises(DominoError) as refused:
        refuse_changes(OLD, new, free=("decode",), allowed=())
    assert str(refused.value).splitlines()[1:] == [
        "  train.gamma: 7.0 before, 4.0 now",
        "  train.steps: 10 before, 20 now",
        "Set it back, train in another workdir, or allow it with --allow_config_change=train.gamma,train.steps",
    ]
    assert refused.value.exit_code == 2
    with pytest.raises(DominoError, match="train.steps"):
        refuse_changes(OLD, new, free=("decode",), allowed=("train.gamma",))
    refuse_changes(OLD, new, free=("decode",), allowed=("train.gamma", "train.steps"))
    refuse_changes(OLD, new, free=("decode",), allowed=("train",))


def test_what_decides_the_shapes_of_a_checkpoint_is_not_offered_and_not_allowed():
    old, new = ({"drafter": {"head": head}, "train": {"steps": steps}} for head, steps in (("domino", 1), ("none", 2)))
    for allowed in ((), ("drafter", "train")):
        with pytest.raises(DominoError, match="(?s)drafter.head: 'domino' before, 'none' now.*cannot allow") as refused:
            refuse_changes(old, new, free=(), allowed=allowed, fixed=("drafter.head",))
        assert "allow_config_change=" not in str(refused.value)
    assert {"drafter.head", "train.optimizer", "train.ema_decay"} < {*fixed_keys(load_recipe("tiny"))}
