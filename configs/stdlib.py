"""A draft for a small target, on the source of Python's standard library.

    python train/pretrain.py --config configs/stdlib.py
    python train/distill.py --config configs/stdlib.py

The corpus is on every machine that runs Python, so nothing is downloaded. On
two CPU cores the target takes two or three minutes, and so do six drafts.
`configs/stdlib.py:tiny` does all of it in seconds and learns nothing.
"""

from ml_collections import config_dict


def get_config(variant: str = '') -> config_dict.ConfigDict:
  """The configuration; `variant` is '' or 'tiny'."""
  config = config_dict.ConfigDict()
  config.workdir = 'runs/stdlib'

  config.corpus = corpus = config_dict.ConfigDict()
  corpus.name = 'stdlib'
  corpus.text_field = ''  # of a catalogue set, where it has several
  corpus.tokenizer = 'bpe'  # byte-level, trained on the train split; or 'bytes'
  corpus.vocab_size = 4096  # a larger one costs the draft more than it gains
  corpus.test = ''  # files:GLOB, of local text with a test split of its own
  corpus.window = 256  # tokens; a window costs its square only in attention

  config.target = target = config_dict.ConfigDict()
  target.path = ''  # of a model to be taken instead: a folder, .gguf, hub name
  target.tokenizer_path = ''  # of it; empty: in the folder, or beside the file
  target.document_start = ''  # before each document; empty: as its files say
  target.document_end = ''  # the token behind it; likewise
  target.width = 512
  target.layers = 6  # few and wide: a CPU multiplies large matrices best
  target.heads = 8  # of 64, the usual size
  target.kv_heads = 2  # a quarter of the cache to read at every step
  target.hidden = 1536  # 20 M parameters in all: 81 MB, more than a CPU caches
  target.dtype = 'float32'  # exact under speculation; bfloat16 flips near-ties
  target.remat = False  # True: training keeps less, and computes a third more

  config.draft = config_dict.ConfigDict()
  config.draft.drafter = 'model'  # a file of specjax/drafters
  config.draft.path = ''  # a model that the draft begins as, with its sizes
  config.draft.model = draft = config_dict.ConfigDict()
  draft.width = 128
  draft.layers = 1  # its head over the vocabulary costs as much as two more
  draft.heads = 2
  draft.kv_heads = 2
  draft.hidden = 344
  draft.dtype = 'float32'
  draft.remat = False

  config.pretrain = pretrain = config_dict.ConfigDict()
  pretrain.steps = 480  # under one pass: there is no time to overfit
  pretrain.batch = 2  # small: many updates matter most in a short run
  pretrain.accumulate = 1  # parts of a batch, in turns: saves memory
  pretrain.dtype = 'float32'  # or bfloat16: of the factors of products
  pretrain.learning_rate = 1e-3
  pretrain.warmup = 48  # a tenth; then a cosine to zero
  pretrain.weight_decay = 0.1
  pretrain.clip = 1.0  # of the gradient's norm
  pretrain.eval_every = 120  # steps between evaluations and checkpoints
  pretrain.eval_windows = 32  # held-out windows that the loss is taken on
  pretrain.seed = 0

  config.distill = distill = config_dict.ConfigDict()
  distill.steps = 240
  distill.batch = 4
  distill.accumulate = 1
  distill.dtype = 'float32'  # or bfloat16, for the target too
  distill.learning_rate = 4e-3  # a small model bears a higher one
  distill.warmup = 24
  distill.weight_decay = 0.0  # too small to overfit
  distill.clip = 1.0
  distill.eval_every = 120
  distill.patience = 0  # evaluations without a gain before it stops; 0: never
  distill.seed = 1

  config.loss = loss = config_dict.ConfigDict()
  loss.kl_weight = 3.0  # of the divergence per unit of CE; inf is all of it
  loss.divergence = 'forward_kl'  # of specjax/losses.py, or module:function
  loss.beta = 0.5  # of jsd: near 0 as forward_kl, near 1 as reverse_kl
  loss.eta = 3.0  # of hybrid: 0 is forward_kl alone
  loss.at_decode_warp = False  # True: of the laws at decode.temperature
  loss.horizon_decay = 0.8  # per token further ahead, of drafters with heads
  loss.lookahead = 0  # K: neg_log_acceptance becomes the expected length at K

  config.ablation = ablation = config_dict.ConfigDict()
  # Drafts that differ in KL weight and seed alone train together, behind one
  # pass of the target. Any key of draft, distill, loss and data may be an axis,
  # and decode.k, decode.temperature, decode.verify: see configs/ablation_kl.py.
  ablation.axes = axes = config_dict.ConfigDict()
  axes.loss = config_dict.ConfigDict()
  axes.loss.kl_weight = (0.0, 0.1, 0.3, 1.0, 3.0, float('inf'))
  ablation.seeds = 1  # 3 or more for intervals; memory and time grow with both
  ablation.together = 32  # drafts trained at once, at most
  ablation.timed_prompts = 0  # to time each draft on; eval/speedup.py does one
  ablation.repeats = 3  # of these timings

  # Devices by axis: rows are divided over data and fsdp, parameters over fsdp
  # and tensor; see specjax/sharding.py.
  config.mesh = mesh = config_dict.ConfigDict()
  mesh.data = 1  # 0: all devices that the other axes leave
  mesh.fsdp = 1
  mesh.tensor = 1

  config.validation = validation = config_dict.ConfigDict()
  validation.sequences = 64  # that the target writes, on held-out prompts
  validation.prompt_length = 32
  validation.tokens = 96

  config.decode = decode = config_dict.ConfigDict()
  decode.k = 6  # tokens drafted per round
  decode.draft_length = 'fixed'  # or fallback, adaptive, confidence: at most k
  decode.verify = 'rejection'  # a rule of specjax/verify, or module:function
  decode.temperature = 1.0  # 0 is greedy
  decode.max_new_tokens = 96
  decode.prompt_length = 32

  # What the draft learns from: shares of the rows of a batch.
  config.data = data = config_dict.ConfigDict()
  data.corpus = 1.0  # text of the train split
  data.target = 0.0  # its prompts, continued by the target (the draft drafts)
  data.draft = 0.0  # or by the draft alone, on-policy
  data.refresh = 60  # steps until they write anew, with the draft of that step
  data.sequences = 128  # each; two fit in a window, 4 * 60 rows are read
  data.prompt_length = 32  # as where it is measured
  data.tokens = 96
  data.temperature = decode.get_oneway_ref('temperature')  # unless it is given

  config.speedup = speedup = config_dict.ConfigDict()
  speedup.batches = (1, 4, 16)  # one reader, and where a pass is not free
  speedup.temperatures = (0.0, 1.0)  # share their programs
  speedup.ks = (1, 2, 3, 4, 6, 8, 12, 16)  # denser where the best one lies
  speedup.controllers = ('fallback', 'adaptive', 'confidence')
  speedup.controlled_k = 8  # the longest they may choose, of ks at most
  speedup.prompts = 4  # decoded alone, else it would be one prompt's luck
  speedup.others = 32  # to predict from; greedy texts differ much
  speedup.repeats = 3  # the fewest with a median inside least and most

  # Ways to draft, as kind:draft@size, for eval/drafters.py; configs/drafters.py
  # has more of them.
  config.drafters = contest = config_dict.ConfigDict()
  contest.arms = (
    'ngram',
    'suffix',
    'model:draft',
    'iid:draft',  # a tree of 2x2, which are as many nodes as decode.k
    'distinct:draft',
    'mixture:draft',
    'early_exit:1',
  )
  contest.rules = ('rejection', 'block', 'traversal')  # those that fit an arm
  contest.contrastive_arms = ('model:draft', 'ngram')  # in front of that target
  contest.amateur = 'draft'  # of models.contrastive; its expert is the target
  contest.alpha = 0.1  # the least share of the largest p that is plausible
  contest.betas = (0.0, 0.1, 0.5)  # strengths of the contrast; () leaves it out
  contest.batches = (1, 8)
  contest.temperatures = (0.0, 1.0)
  contest.prompts = 4
  contest.repeats = 3

  # Drafts of about 1/2, 1/5, 1/10, 1/20 and 1/50 of the target's parameters, a
  # column each. Depth shrinks with width, down to the two layers it takes to
  # look back at what followed a token earlier.
  config.draft_sizes = sizes = config_dict.ConfigDict()
  sizes.width = (384, 256, 192, 128, 64)
  sizes.layers = (5, 4, 3, 2, 2)
  sizes.heads = (6, 4, 3, 2, 1)  # of 64, like the target's
  sizes.kv_heads = (2, 2, 1, 2, 1)
  sizes.hidden = (1152, 704, 560, 448, 256)
  # A sum over `width` weights moves by about the rate times the width in a step
  # of Adam, so the rate is its inverse (Yang et al. 2022, arXiv 2203.03466). At
  # twice these rates α falls by .10 at widths 64 and 128, by .04 at 192 and by
  # nothing at 384.
  sizes.learning_rate = tuple(0.256 / width for width in sizes.width)

  if variant == 'tiny':
    config.workdir = 'runs/stdlib-tiny'
    corpus.tokenizer, corpus.vocab_size = 'bytes', 256
    corpus.window = 32
    for model in (target, draft):
      model.width, model.layers, model.hidden = 32, 1, 64
      model.heads, model.kv_heads = 2, 1
    for training in (pretrain, distill):
      training.steps, training.batch, training.warmup = 4, 2, 1
      training.eval_every = 2
    validation.sequences, validation.prompt_length = 4, 4
    validation.tokens = 8
    data.refresh, data.sequences = 2, 4
    data.prompt_length, data.tokens = 4, 8
    decode.k, decode.max_new_tokens = 2, 8
    decode.prompt_length = 4
    speedup.batches, speedup.ks = (1, 2), (1, 2)
    speedup.controlled_k = 2
    speedup.prompts, speedup.repeats, speedup.others = 2, 2, 2
    contest.arms = 'ngram', 'model:draft', 'distinct:draft@2', 'mixture:draft'
    contest.rules = 'rejection', 'block', 'traversal'
    contest.betas, contest.batches = (0.5,), (1, 2)
    contest.prompts, contest.repeats = 2, 2
    sizes.width, sizes.layers, sizes.hidden = (32, 16), (1, 1), (32, 16)
    sizes.heads, sizes.kv_heads = (2, 1), (1, 1)
    sizes.learning_rate = (4e-3, 4e-3)
  elif variant:
    raise ValueError("there is no such variant; there is 'tiny'")
  return config
