"""Milliseconds of plain, DFlash and Domino decoding in vLLM, with random weights and a forced acceptance length.

    pip install ./integrations/vllm                                                # where vLLM is installed
    python benchmarks/device/vllm_decode.py --here=8b.json --output=vllm_8b.json   # on one GPU
    python benchmarks/device/vllm_decode.py --small                                # a test of the command, on a CPU

It needs vLLM alone and reads the shape from assets/qwen3_configs. 8b.json is the output of
benchmarks.device.decode_latency on the same GPU; with it the table has the rounds of domino_jax beside those of vLLM.
Both have 1,024 tokens before the first round that is timed. Each mode runs in a separate process. The texts are
meaningless.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ASSETS = pathlib.Path(__file__).resolve().parents[2] / "assets"
# vLLM's mode → the part of decode_latency's file that does the same work.
MODES = {"plain": "step", "dflash": "round_without_head", "domino": "round"}
BLOCK, LAYERS, TAU = 16, 5, 7.17  # τ is decode_latency's


def write_folders(folder: pathlib.Path, size: str) -> None:
    """config.json of the target, and of a DFlash and a Domino drafter of the published form."""
    target = json.loads((ASSETS / "qwen3_configs" / size / "config.json").read_text())
    depth = target["num_hidden_layers"]
    taps = [round(1 + index * (depth - 4) / (LAYERS - 1)) for index in range(LAYERS)]
    drafting = {"mask_token_id": target["vocab_size"] - 1, "target_layer_ids": taps}
    head = {"projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1}
    head |= {"emb_dim": 256, "gru_hidden_dim": 1024}
    drafter = target | {"num_hidden_layers": LAYERS, "block_size": BLOCK, "architectures": ["DFlashDraftModel"]}
    drafter |= {"layer_types": ["full_attention"] * LAYERS, "tie_word_embeddings": False}
    for name, raw in (
        ("target", target),
        ("dflash", drafter | {"dflash_config": drafting}),
        ("domino", drafter | {"dflash_config": drafting | head}),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(raw))


def copy_tiny_folders(folder: pathlib.Path) -> None:
    """The shipped tiny pair, and its backbone as a DFlash drafter: vLLM's CPU build opens none without weights."""
    from safetensors.torch import load_file, save_file

    for name, source in (("target", "tiny_qwen3"), ("dflash", "tiny_domino"), ("domino", "tiny_domino")):
        shutil.copytree(ASSETS / source, folder / name)
    weights, config = folder / "dflash" / "model.safetensors", folder / "dflash" / "config.json"
    tensors = load_file(weights)
    head = [name for name in tensors if name.startswith(("prefix_gru.", "embed_proj."))]
    save_file({name: tensor for name, tensor in tensors.items() if name not in head}, weights)
    raw = json.loads(config.read_text())
    del raw["dflash_config"]["projector_type"]
    config.write_text(json.dumps(raw))


def engine_options(folder: pathlib.Path, mode: str, choices: argparse.Namespace) -> dict:
    options = {
        **{"model": str(folder / "target"), "skip_tokenizer_init": True},
        **{"max_model_len": choices.prompt + choices.tokens + 64, "max_num_seqs": choices.rows},
        "enable_prefix_caching": False,
    }
    # The sampling of vLLM's CPU build cannot force an acceptance.
    forced = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": choices.tau}
    if mode != "plain":
        block = json.loads((folder / mode / "config.json").read_text())["block_size"]
        drafts = block if mode == "domino" else block - 1
        drafter = {"method": "dflash", "model": str(folder / mode), "num_speculative_tokens": drafts}
        options["speculative_config"] = drafter | ({} if choices.small else forced)
    small = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 2**27}
    return options | (small if choices.small else {"load_format": "dummy"})


def measure(folder: pathlib.Path, mode: str, choices: argparse.Namespace) -> dict:
    """The median milliseconds between two answers of the engine, and the tokens of one, in this process."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLM(**engine_options(folder, mode, choices)).llm_engine
    sampling = SamplingParams(
        **{"temperature": 0.0, "max_tokens": choices.tokens, "ignore_eos": True, "detokenize": False},
        output_kind=RequestOutputKind.DELTA,
    )
    times, tokens = [], []
    for turn in ("warm", "timed"):
        times, tokens = [], []
        for row in range(choices.rows):
            prompt = [(7 * row + 3 * index) % 64 for index in range(choices.prompt)]
            engine.add_request(f"{turn} {row}", {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            count = sum(len(output.outputs[0].token_ids) for output in engine.step())
            if count:
                times.append(time.perf_counter())
                tokens.append(count)
    spent = [1e3 * (after - before) for before, after in zip(times[1:], times[2:], strict=False)]
    return {"ms": statistics.median(spent), "tokens": statistics.mean(tokens[2:]) / choices.rows}


def run_mode(folder: pathlib.Path, mode: str, argv: list[str]) -> dict:
    """`measure` in a separate process, so that the device is free again; vLLM's log goes to the standard error."""
    words = [sys.executable, __file__, *argv, f"--mode={mode}", f"--folder={folder}"]
    subprocess.run(words, stdout=sys.stderr, check=True)
    return json.loads((folder / f"{mode}.json").read_text())


def table(modes: dict[str, dict], here: dict) -> str:
    lines = [
        "| mode | vLLM, ms | ÷ its plain step | tokens | domino_jax, ms | ÷ its plain step |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for mode, figures in modes.items():
        ms = here.get(MODES[mode], {}).get("ms")
        ours = f"{ms:.2f} | {ms / here['step']['ms']:.2f}" if ms else "– | –"
        ratio = figures["ms"] / modes["plain"]["ms"]
        lines.append(f"| {mode} | {figures['ms']:.2f} | {ratio:.2f} | {figures['tokens']:.2f} | {ours} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="8b", help="a folder of assets/qwen3_configs")
    parser.add_argument("--tau", type=float, default=TAU, help="acceptance length to force")
    for name, default in (("rows", 1), ("prompt", 1024), ("tokens", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--small", action="store_true", help="the shipped tiny pair in float32")
    parser.add_argument("--here", type=pathlib.Path, help="output of benchmarks.device.decode_latency")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file to write as well")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    choices = parser.parse_args(argv)
    if choices.small:
        choices.prompt, choices.tokens = 16, 48
    if choices.mode:
        figures = measure(choices.folder, choices.mode, choices)
        (choices.folder / f"{choices.mode}.json").write_text(json.dumps(figures))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if choices.small:
            copy_tiny_folders(folder)
        else:
            write_folders(folder, choices.size)
        modes = {mode: run_mode(folder, mode, argv) for mode in MODES}
    here = json.loads(choices.here.read_text())["parts"] if choices.here else {}
    print(table(modes, here))
    if choices.output:
        choices.output.write_text(json.dumps({"vllm": modes, "domino_jax": here}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
