"""Shared by the recipes of the public Qwen3 sizes: the paper's values.

Not a recipe by itself; qwen3_8b.py is one. A recipe holds choices; every shape of the target comes from the config.json
in its folder. A key is declared on one line: its default, its range and what it means. The keys of a head are declared
in its file (domino_jax/method/heads/), the keys of decoding in method/settings.py and decoding/settings.py.
"""

from domino_jax.decoding.settings import DTYPES, DecodeSettings
from domino_jax.method.drafters import CONFIGS
from domino_jax.method.fields import LARGEST_BLOCK
from domino_jax.method.settings import DraftSettings, SamplingParams, TreeSettings
from domino_jax.models.decoder_config import LIMITS
from domino_jax.runtime.keys import Key, Section, keys_of, section
from domino_jax.weights.quantization import QUANTIZE


def get_config(hub_id: str) -> Section:
    """The paper's recipe for one target: a hub id, or with --config.target.path a local folder.

    Locked: a recipe that sets a key which is not here does not load.
    """
    config = section(
        seed=Key(42, least=0),
        target=_target(hub_id),
        drafter=_drafter(),
        data=_data(),
        train=_train(),
        checkpoint=_checkpoint(),
        eval=_evaluation(),
        mesh=_mesh(),
        decode=_decode(),
        regenerate=_regenerate(),
        serve=_serve(),
    )
    return config.lock()


def _target(hub_id: str) -> Section:
    return section(
        path=hub_id,
        # The type of the target's weights and of all computation in train and regenerate. The drafter's master weights
        # and moments are float32.
        dtype=Key("bfloat16", choices=DTYPES),
        # Copies of a floating folder's matrices in eight bits, made when it is loaded; the text is then that of these
        # copies. _layers leaves the lm_head as it is. Absent: as the folder has them. The embedding is never changed.
        quantize=Key(str, choices=tuple(QUANTIZE)),
    )


def _drafter() -> Section:
    return section(
        path=Key(str),  # decode: a Hugging Face folder or a train workdir
        # none is the backbone alone. eagle3 has no backbone: it reads its own section, intermediate_size and
        # target_layer_ids alone (docs/heads.md).
        head=Key("domino", choices=tuple(CONFIGS), shape=True),
        num_layers=Key(5, least=1, most=LIMITS["num_hidden_layers"], shape=True),
        # Absent: the target's; a smaller one buys layers.
        intermediate_size=Key(int, least=1, most=LIMITS["intermediate_size"], shape=True),
        block_size=Key(16, least=2, most=LARGEST_BLOCK, shape=True),  # an anchor and a draft at least
        # Slot k predicts the token after its own. Absent: as public checkpoints of the head have it, domino and markov
        # True, the other block drafters False.
        shift_label=Key(bool),
        # Above 0: draft layers read a window of this many tokens of the text, and no later slot of their block.
        sliding_window=Key(0, least=0),
        target_layer_ids=Key(tuple, of=int, least=0, shape=True),  # absent: spread over the target by the public rule
        mask_token_id=Key(int, least=0),  # absent: <|mask|>, or an id that the tokenizer gives to no token
        # A section per head: drafter.domino.emb_dim, drafter.markov.rank, …
        **{head: section(**keys) for head, config in CONFIGS.items() if (keys := config.recipe_keys())},
    )


def _data() -> Section:
    return section(
        train=Key(str),  # one file or a glob; JSONL, plain or .gz
        regenerate=False,  # True: the target answers the prompts of data.train first
        # Rows of data.train, eval.prompts and --prompts that cannot be used. False: they are listed and the command
        # ends with exit code 3. True: they are left out and counted.
        skip_bad_rows=False,
        max_length=Key(3072, least=2),  # tokens of a row
        # pad: to max_length. pack: several rows in one. A checkpoint's position in the data counts the items of its
        # layout.
        layout=Key("pad", choices=("pad", "pack"), shape=True),
    )


def _train() -> Section:
    return section(
        steps=Key(532_500, least=1),  # 6 epochs of the paper's 1.42 M rows in batches of 16; count again for other data
        batch_size=Key(16, least=1),  # rows of a step, over all devices
        accumulate=Key(1, least=1),  # micro-batches that a step's rows are cut into: memory against speed
        log_every=Key(20, least=1),
        num_anchors=Key(256, least=1),
        remat=False,  # True: draft layers are computed again in the backward pass
        # own: the loss of the drafter's head. cross_entropy: that of Domino, which none and domino have anyway.
        # A markov head has a confidence head with its own loss alone.
        loss=Key("own", choices=("own", "cross_entropy"), shape=True),
        gamma=Key(7.0, above=0),  # decay over the slots of a block; inf: none
        dpace_alpha=Key(float, least=0, most=1),  # α of D-PACE weights (0.5, say), which replace the decay
        # A drafter's folder or train workdir: its weights are the first of this run, whose schedules start at step 0.
        start_from=Key(str),
        # A drafter's folder or train workdir: its backbone stays as it is, and the head alone is trained.
        frozen_backbone=Key(str),
        lambda_start=Key(1.0, least=0, most=1),
        lambda_decay_ratio=Key(1.0, least=0),  # share of the run over which λ falls to 0; inf: λ stays
        optimizer=Key("adamw", choices=("adamw", "muon"), shape=True),
        learning_rate=Key(6e-4, above=0, below=float("inf")),
        warmup_ratio=Key(0.04, least=0, below=1),
        # The decay of an average of the weights, which is then evaluated and exported; 0: no average.
        ema_decay=Key(0.0, least=0, below=1, shape=True),
        # At a loss or gradient that is not finite: stop, or skip, which leaves the step out and counts it.
        non_finite=Key("stop", choices=("stop", "skip")),
        # If a step takes longer, the stacks of all threads are printed and the process ends with exit code 43, after
        # which launchers start it again. Compilation, evaluations and checkpoints may take ten times as long. 0: never.
        hang_seconds=Key(0.0, least=0),
    )


def _checkpoint() -> Section:
    return section(
        every=Key(1_000, least=1),  # the newest three are stored, and the best one by τ
    )


def _evaluation() -> Section:
    return section(
        # Held-out prompt rows, also of decode without --prompts. Absent: 64 prompts of data.train, whose rows are then
        # not trained on, unless there are answers.
        prompts=Key(str),
        num_prompts=Key(64, least=1),
        # Rows with the target's own answers to such prompts, as regenerate writes them. Absent: the target answers the
        # prompts at the start of the run, greedily.
        answers=Key(str),
        # Steps between evaluations, 0: none. A fixed number, so that every process and every start agree: one that
        # takes as long as 100 steps costs 2 % of the time. metrics.jsonl has eval_seconds.
        every=Key(5_000, least=0),
        final=False,  # True: one process decodes eval.prompts in all modes at the end, into report/
    )


def _mesh() -> Section:
    # Their product is the number of devices; -1 is the rest. Parameters are split over fsdp, heads and vocabulary over
    # tensor.
    return section(data=Key(1, least=-1), fsdp=Key(-1, least=-1), tensor=Key(1, least=-1))


def _decode() -> Section:
    # Every field of these classes that is declared by `key` is a key here: modes, temperature, num_drafts, …
    fields = keys_of(DecodeSettings) | keys_of(SamplingParams) | keys_of(DraftSettings)
    return section(
        **fields,
        num_prompts=Key(128, least=0),  # the first N rows of --prompts, or of eval.prompts; 0: all
        # The trees of mode tree (docs/decoding.md).
        tree=section(**keys_of(TreeSettings)),
        tasks=Key((), of=str),  # of the paper, instead of prompts: ("gsm8k", "humaneval=FILE.jsonl", …)
        mesh=section(
            data=Key(1, least=-1),  # devices that share the rows of a batch; -1 is the rest
            tensor=Key(1, least=-1),  # devices that share heads, feed-forward and vocabulary
        ),
    )


def _regenerate() -> Section:
    sampling = keys_of(SamplingParams)
    return section(
        num_prompts=Key(0, least=0),  # the first N rows; 0: all
        batch_size=Key(16, least=1),
        use_drafter=False,  # True: config.drafter.path drafts, and the same answers come faster
        max_new_tokens=Key(2048, least=1),
        # Qwen3's advice for answers without thinking.
        temperature=sampling["temperature"].change(default=0.7),
        top_k=sampling["top_k"].change(default=20),
        top_p=sampling["top_p"].change(default=0.8),
    )


def _serve() -> Section:
    return section(
        batch_size=Key(16, least=1),  # requests decoded together in each mode
        # Memory for the caches of finished texts, from which prompts that begin alike start. 0: none are stored.
        prefix_gib=Key(4.0, least=0, below=float("inf")),
    )
