"""What the recipes of the public Qwen3 sizes share: the paper's values.

Not a recipe by itself; qwen3_8b.py is one. A recipe holds choices; every shape of the target comes from the config.json
in its folder.
"""

from ml_collections import config_dict


def get_config(hub_id: str) -> config_dict.ConfigDict:
    """The paper's recipe for one target: a hub id, or with --config.target.path a local folder."""
    config = config_dict.ConfigDict()
    config.seed = 42

    config.target = target = config_dict.ConfigDict()
    target.path = hub_id
    target.dtype = "bfloat16"

    config.drafter = drafter = config_dict.ConfigDict()
    drafter.path = config_dict.placeholder(str)  # decode: a Hugging Face folder or a train workdir
    drafter.projector = "domino"  # or dflash: the backbone alone
    drafter.num_layers = 5
    drafter.block_size = 16
    drafter.gru_hidden_dim = 1024
    drafter.emb_dim = 256
    drafter.pure_draft_prefix_len = 1
    drafter.shift_label = True
    drafter.target_layer_ids = config_dict.placeholder(tuple)  # absent: spread over the target by the public rule
    drafter.mask_token_id = config_dict.placeholder(int)  # absent: <|mask|>, or the first row past the tokenizer

    config.data = data = config_dict.ConfigDict()
    data.train = config_dict.placeholder(str)  # JSONL, DESIGN "training rows"; name it on the command line
    data.regenerate = False  # True: the target answers the prompts of data.train first
    data.max_length = 3072
    data.thinking = False

    config.train = train = config_dict.ConfigDict()
    train.steps = 532_500  # 6 epochs of the paper's 1.42 M rows at 16 rows a step; count again for other data
    train.batch_size = 16
    train.log_every = 50
    train.num_anchors = 256
    train.loss_slice_blocks = 128  # blocks whose logits live at once: memory against speed
    train.gamma = 7.0  # inf: no decay over the slots of a block
    train.contiguous_labels = True  # False: keep labels behind an unsupervised token, as SpecForge does
    train.lambda_start = 1.0
    train.lambda_decay_ratio = 1.0
    train.optimizer = "adamw"  # or muon
    train.learning_rate = 6e-4
    train.warmup_ratio = 0.04
    train.clip_norm = 1.0
    train.weight_decay = 0.0
    train.b1 = 0.9
    train.b2 = 0.999
    train.eps = 1e-8
    train.loss_slice_blocks = 128  # anchor blocks whose logits live at a time
    train.dtype = "bfloat16"  # of the computation; master weights and moments are float32

    config.checkpoint = checkpoint = config_dict.ConfigDict()
    checkpoint.every = 1_000
    checkpoint.keep = 3

    config.eval = evaluation = config_dict.ConfigDict()
    evaluation.prompts = config_dict.placeholder(str)  # held-out prompt rows; needed once every > 0 or final
    evaluation.num_prompts = 64
    evaluation.batch_size = 1
    evaluation.batch_size = 1
    evaluation.every = 0
    evaluation.final = False

    config.mesh = mesh = config_dict.ConfigDict()
    mesh.data = 1
    mesh.fsdp = 1
    mesh.tensor = 1

    config.decode = decode = config_dict.ConfigDict()
    decode.modes = ("autoregressive", "backbone", "domino")
    decode.prompts = config_dict.placeholder(str)  # or --prompts, --prompt
    decode.num_prompts = 128  # the first so many rows
    decode.max_new_tokens = 2048
    decode.temperature = 0.0
    decode.top_k = 0  # 0: off
    decode.top_p = 1.0
    decode.min_p = 0.0
    decode.seed = 0
    decode.batch_size = 1
    decode.dtype = "bfloat16"
    decode.cache_length = 4096
    # c of the draft's argmax(c·log q + noise) at temperature > 0; inf drafts greedily. On the tiny models at T =
    # 1 (24 prompts) τ was 6.55 with inf and 5.83 with 1, which also pays for the noise.
    decode.draft_scale = float("inf")
    decode.stop_ids = ()  # besides those of the target's folder
    decode.ignore_eos = False
    decode.thinking = False

    config.regenerate = regenerate = config_dict.ConfigDict()
    regenerate.num_prompts = 0  # the first so many rows; 0: all
    regenerate.batch_size = 16
    regenerate.max_new_tokens = 2048
    regenerate.temperature = 0.7  # Qwen3's advice for answers without thinking
    regenerate.top_k = 20
    regenerate.top_p = 0.8
    regenerate.seed = 0
    return config
