"""A kernel that fails its trial on a device is not used there."""

import logging

import jax
import jax.numpy as jnp
import pytest

from domino_jax.evals import report
from domino_jax.models import kernels
from domino_jax.models.attention import attend_cache


def planted(form):
    return form, jnp.sin, (jnp.arange(8.0),)


def raising(x):
    raise NotImplementedError("Unsupported lowering for GPUs")


PLANTED = {"right": planted(jnp.sin), "wrong": planted(lambda x: jnp.sin(x) * 1.1), "unsupported": planted(raising)}


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """REFUSED, empty before and after, with verdicts kept in a new folder."""
    monkeypatch.setattr(kernels, "REFUSED", kernels.REFUSED)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield kernels.REFUSED
    jax.config.update("jax_compilation_cache_dir", before)
    kernels.REFUSED.clear()


def test_a_wrong_kernel_and_one_that_raises_are_refused_in_one_line_and_in_the_report(refused, monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernels, "trials", lambda platform: PLANTED)
    with caplog.at_level(logging.WARNING):
        kernels.refuse_faulty.__wrapped__()
    assert refused.keys() == {"wrong", "unsupported"}
    assert refused["wrong"] == "it is 0.1 of the largest value off"
    assert "Unsupported lowering" in refused["unsupported"]
    assert [line.count("\n") for line in caplog.messages] == [0, 0]
    assert all(reason in report.device() for reason in refused.values())


def test_verdicts_are_stored(refused):
    assert kernels.judge(PLANTED).keys() == {"wrong", "unsupported"}
    assert kernels.judge({}).keys() == {"wrong", "unsupported"}


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_every_kernel_passes_its_trial_in_the_interpreter(platform):
    trials = kernels.trials(platform, interpret=True)
    assert {name: kernels.fault_of(*trial) for name, trial in trials.items()} == dict.fromkeys(trials, "")


def test_attention_takes_the_form_of_xla_where_its_kernel_is_refused(refused):
    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 32, 17, 128), (1, 8, 4096, 128)))
    mask = jax.ShapeDtypeStruct((1, 17, 4096), bool)

    def text():
        traced = jax.jit(lambda *arguments: attend_cache(*arguments)).trace(q, k, k, mask)
        return traced.lower(lowering_platforms=("tpu",)).as_text()

    assert "tpu_custom_call" in text()
    refused["attention"] = "it failed"
    assert "tpu_custom_call" not in text()
