"""What the recipes of the public Qwen3 sizes share: the paper's values.

Not a recipe by itself; qwen3_8b.py is one. A recipe holds choices; every shape of the target comes from the config.json
in its folder.
"""

from ml_collections import config_dict


def get_config(hub_id: str) -> config_dict.ConfigDict:
    """The paper's recipe for one target: a hub id, or with --config.target.path a local folder.

    Locked: a recipe that sets a key which is not here does not load.
    """
    config = config_dict.ConfigDict()
    config.seed = 42
    config.target = _target(hub_id)
    config.drafter = _drafter()
    config.data = _data()
    config.preflight = _preflight()
    config.train = _train()
    config.checkpoint = _checkpoint()
    config.eval = _evaluation()
    config.mesh = _mesh()
    config.decode = _decode()
    config.regenerate = _regenerate()
    return config.lock()


def _target(hub_id: str) -> config_dict.ConfigDict:
    target = config_dict.ConfigDict()
    target.path = hub_id
    # The type of the target's weights and of all computation in train and regenerate. The drafter's master weights and
    # moments are float32.
    target.dtype = "bfloat16"
    return target


def _drafter() -> config_dict.ConfigDict:
    drafter = config_dict.ConfigDict()
    drafter.path = config_dict.placeholder(str)  # decode: a Hugging Face folder or a train workdir
    # none (the backbone alone), domino, markov or dflash2; eagle3 or medusa, which have no backbone and read their own
    # sections alone, and eagle3 intermediate_size and target_layer_ids as well (docs/heads.md).
    drafter.head = "domino"
    drafter.num_layers = 5
    drafter.intermediate_size = config_dict.placeholder(int)  # absent: the target's; a smaller one buys layers
    drafter.block_size = 16
    drafter.gru_hidden_dim = 1024
    drafter.emb_dim = 256
    drafter.pure_draft_prefix_len = 1
    # The head markov: vanilla, gated or rnn, its rank, and a head that estimates each draft's chance.
    drafter.markov_head_type = "vanilla"
    drafter.markov_rank = 256
    drafter.enable_confidence_head = config_dict.placeholder(bool)  # absent: where the loss trains it
    drafter.confidence_head_with_markov = True  # it reads the token before the slot as well
    # The head dflash2: the width of its two codebooks, and the candidates of a slot.
    drafter.selector_rank = 256
    drafter.selector_top_k = 16
    # Convolutions inside a block, with any head: taps (0: none), and channels that share a dynamic filter. Absent: 2
    # taps with the head dflash2, else none.
    drafter.conv_kernel_size = config_dict.placeholder(int)
    drafter.conv_group_size = 16
    # Slot k predicts the token after its own. Absent: as public checkpoints of the head have it, domino and markov
    # True, none and dflash2 False.
    drafter.shift_label = config_dict.placeholder(bool)
    drafter.eagle3 = eagle3 = config_dict.ConfigDict()
    # Tokens that it can draft, the most frequent ones of the training rows' answers; all if the target has fewer.
    eagle3.draft_vocab_size = 32_000
    drafter.medusa = medusa = config_dict.ConfigDict()
    medusa.num_heads = 5  # tokens drafted a round
    medusa.num_layers = 1  # residual blocks of a head
    medusa.bias = False  # of these blocks
    drafter.target_layer_ids = config_dict.placeholder(tuple)  # absent: spread over the target by the public rule
    drafter.mask_token_id = config_dict.placeholder(int)  # absent: <|mask|>, or the first row past the tokenizer
    return drafter


def _data() -> config_dict.ConfigDict:
    data = config_dict.ConfigDict()
    # One file, a glob, or a weighted mixture "A.jsonl=0.7,B/*.jsonl.gz=0.3"; JSONL (plain, .gz, .zst) or ArrayRecord.
    data.train = config_dict.placeholder(str)
    data.regenerate = False  # True: the target answers the prompts of data.train first
    # Rows of this many prompts are never trained on; evaluations use them if eval.prompts is not set. 0: none.
    data.held_out = 64
    # Rows of data.train, eval.prompts and --prompts that cannot be used. False: they are listed and the command ends
    # with exit code 3. True: they are left out and counted.
    data.skip_bad_rows = False
    data.max_length = 3072
    data.thinking = False
    # pad: to max_length. pack: several rows in one. buckets: to a quarter, half or all of max_length, by the batch's
    # longest row.
    data.layout = "pad"
    return data


def _preflight() -> config_dict.ConfigDict:
    preflight = config_dict.ConfigDict()
    preflight.rows = 64  # rows whose answers the target scores before the first step; 0: none
    return preflight


def _train() -> config_dict.ConfigDict:
    train = config_dict.ConfigDict()
    train.steps = 532_500  # 6 epochs of the paper's 1.42 M rows at 16 rows a step; count again for other data
    train.batch_size = 16  # rows of a step, over all devices
    train.accumulate = 1  # micro-batches that a step's rows are cut into: memory against speed
    train.log_every = 20
    train.num_anchors = 256
    train.remat = False  # True: draft layers are computed again in the backward pass
    # own: the loss of the drafter's head. cross_entropy: that of Domino, which none and domino have anyway.
    train.loss = "own"
    train.markov_weights = (0.1, 0.9, 1.0)  # of cross-entropy, L1 distance and confidence in markov's own loss
    train.gamma = 7.0  # inf: no decay over the slots of a block
    train.dpace_alpha = config_dict.placeholder(float)  # α of D-PACE weights (0.5, say), which replace the decay
    train.distill = 0.0  # weight of the total-variation distance to the target; the cross-entropy has the rest
    # A drafter's folder or train workdir: its weights are the first of this run, whose schedules start at step 0.
    train.start_from = config_dict.placeholder(str)
    # A drafter's folder or train workdir: its backbone is taken over and left as it is, and the head alone is trained.
    train.frozen_backbone = config_dict.placeholder(str)
    # A drafter's folder or train workdir with the same head, of any target with the same tokenizer: its tables of
    # tokens are the first values of a markov or dflash2 head's.
    train.head_from = config_dict.placeholder(str)
    train.frozen_tables = False  # True: these tables are left as they are
    # In each block the head is cut to its rank times one of these, drawn at random, so that one training serves several
    # values of decode.head_rank, as (0.25, 0.5, 1.0). Empty: never.
    train.rank_scales = ()
    # What a domino or markov head reads in training. text: the tokens of the text. drafts: its own greedy drafts, as
    # when it decodes (training-time test).
    train.head_tokens = "text"
    train.lambda_start = 1.0
    train.lambda_decay_ratio = 1.0  # share of the run over which λ falls to 0; inf: λ stays
    train.selector_alpha = 1.0  # head dflash2: weight of the selector's loss
    train.selector_warmup_ratio = 0.0  # share of the run in which that weight is 0
    train.selector_ramp_ratio = 0.0  # share of the run over which it then rises
    train.eagle3 = eagle3 = config_dict.ConfigDict()
    eagle3.passes = 7  # of the training-time test
    eagle3.decay = 0.8  # weight of each pass' loss to that of the pass before
    train.optimizer = "adamw"  # or muon
    train.learning_rate = 6e-4
    train.warmup_ratio = 0.04
    train.ema_decay = 0.0  # of an average of the weights, which is then evaluated and exported; 0: none
    train.non_finite = "stop"  # at a loss or gradient that is not finite; or skip: leave the step out and count it
    # If a step takes longer, the stacks of all threads are printed; compilation, evaluations and checkpoints may take
    # ten times as long. 0: never.
    train.hang_seconds = 1_800.0
    train.abort_on_hang = False  # True: and the process ends with exit code 43, after which launchers start it again
    train.profile_steps = ()  # (first, last): a profiler trace of these steps in <workdir>/profile
    train.wandb = ""  # a Weights & Biases project to log to as well
    return train


def _checkpoint() -> config_dict.ConfigDict:
    checkpoint = config_dict.ConfigDict()
    checkpoint.every = 1_000
    checkpoint.keep = 3  # the newest N; the best one by τ stays as well
    return checkpoint


def _evaluation() -> config_dict.ConfigDict:
    evaluation = config_dict.ConfigDict()
    # Held-out prompt rows, also of decode and tune without --prompts. Absent: evaluations use those of data.held_out.
    evaluation.prompts = config_dict.placeholder(str)
    evaluation.num_prompts = 64
    evaluation.batch_size = 16  # prompts decoded together; τ does not depend on it, the time does
    # Steps between evaluations, 0: none. A fixed number, so that every process and every start agree: one that takes as
    # long as 100 steps costs 2 % of the time. metrics.jsonl has eval_seconds.
    evaluation.every = 5_000
    evaluation.final = False  # True: one process decodes eval.prompts in all modes at the end, into report/
    return evaluation


def _mesh() -> config_dict.ConfigDict:
    mesh = config_dict.ConfigDict()
    # Their product is the number of devices; -1 is the rest. Parameters are split over fsdp, heads and vocabulary over
    # tensor.
    mesh.data = 1
    mesh.fsdp = -1
    mesh.tensor = 1
    return mesh


def _decode() -> config_dict.ConfigDict:
    decode = config_dict.ConfigDict()
    # Absent: plain decoding, the drafter's own chain, and of a backbone with a head the backbone alone.
    decode.modes = config_dict.placeholder(tuple)
    decode.num_prompts = 128  # the first N rows of --prompts, or of eval.prompts; 0: all
    decode.max_new_tokens = 2048
    decode.temperature = 0.0
    decode.top_k = 0  # 0: off
    decode.top_p = 1.0
    decode.min_p = 0.0
    decode.seed = 0
    decode.batch_size = 1  # requests decoded together; a row that finishes makes room for the next prompt
    decode.dtype = "bfloat16"
    decode.cache_length = 4096  # a limit: the caches follow the text, and a prompt that needs more slots is refused
    # near_tie: texts equal but for near ties, each of them checked. fixed_shape: plain decoding goes through the same
    # wide pass, so texts are equal without exception, in bfloat16 too, and the yardstick pays for the width.
    decode.parity = "near_tie"
    # Tokens drafted and verified. 0: as `python -m domino_jax.tune` measured and stored them with the drafter for this
    # device and the rows of the batch, else all that the drafter's block gives.
    decode.num_drafts = 0
    # c of drafts at temperature > 0: a chain drafts argmax(c·log q + g), with q the drafter's distribution and g the
    # noise with which the target chooses; a tree ranks tokens by log-softmax(log q + g/c). At 1 a drafter with q = p is
    # always accepted; a larger c follows q more sharply, and inf is the greedy draft. The text stays the same. 2 keeps
    # most of what 1 gains where the target is unsure, and costs little where it is sure (docs/decoding.md).
    decode.draft_sharpness = 2.0
    # Tokens per slot that the head of a chain corrects, the likeliest of the backbone. 0: the whole vocabulary, whose
    # matrix is then read once per draft (docs/compilers.md).
    decode.head_candidates = 64
    decode.head_rank = 0  # the head is cut to this rank; 0: all of it (docs/heads.md, train.rank_scales)
    # Above 0: a chain ends before the first draft whose confidence head gives it a smaller chance to be accepted.
    decode.confidence = 0.0
    # Rows at the end of the text that the draft's backbone reads, and rows at its beginning with them. 0: all of the
    # text. It bounds the cost of a draft and helps a drafter that was trained on short texts with long ones.
    decode.draft_window = 0
    decode.draft_sink = 0
    decode.tree = tree = config_dict.ConfigDict()  # what mode tree drafts (docs/decoding.md)
    # Where all of these are as they are here, tune's measurement replaces them.
    tree.nodes = 64  # rows of the verifying pass, the anchor included
    tree.depth = 0  # drafts of its longest path; 0: num_drafts, else all that the block gives
    tree.lanes = 16  # paths that the head follows at a time; 1 is the chain
    tree.candidates = 64  # tokens per depth that it chooses among
    tree.beta = -0.1  # added to a node's log-probability for each step of depth: breadth against depth
    decode.ignore_eos = False  # True: every answer has max_new_tokens
    decode.thinking = False
    decode.simulate_tau = 0.0  # above 0: random weights where there are none, and this acceptance length forced
    decode.tasks = ()  # of the paper, instead of prompts: ("gsm8k", "humaneval=FILE.jsonl", …)
    decode.cores = 0  # of a CPU, to keep to while decoding; 0: all
    decode.concurrency = ()  # also decode at these batch sizes: (1, 2, 4, 8, 16, 32)
    decode.compare = ()  # drafter folders, all of them measured in one run and put into one table
    decode.mesh = decode_mesh = config_dict.ConfigDict()
    decode_mesh.data = 1  # devices that share the rows of a batch; -1 is the rest
    decode_mesh.tensor = 1  # devices that share heads, feed-forward and vocabulary
    return decode


def _regenerate() -> config_dict.ConfigDict:
    regenerate = config_dict.ConfigDict()
    regenerate.num_prompts = 0  # the first N rows; 0: all
    regenerate.batch_size = 16
    regenerate.use_drafter = False  # True: config.drafter.path drafts, and the same answers come faster
    regenerate.max_new_tokens = 2048
    regenerate.temperature = 0.7  # Qwen3's advice for answers without thinking
    regenerate.top_k = 20
    regenerate.top_p = 0.8
    return regenerate
