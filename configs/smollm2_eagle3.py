"""The default drafter: EAGLE-3 kind for SmolLM2-135M-Instruct.

  python train.py --config configs/smollm2_eagle3.py \\
      --config.data="('train-000.jsonl',)" --config.max_chats=1100 \\
      --config.heldout="('heldout.jsonl',)" --config.long_chats=cut \\
      --config.out=runs/smollm2_eagle3

Hardware: 2 CPU cores. Data: 1,100 chats that the target answered itself (682
rows of 512 tokens, 243k of them supervised). Expect an hour on an idle
machine, and held out 1.71 tokens a pass of a chain of three (alpha .444 .412
.455 along it). Going on from there pays (--config.init=FOLDER, a learning rate
of 5e-4, four unrolled steps): three more runs, 2.5M tokens, brought alpha to
.654 .659 .678 .708; the shipped drafter's card has them all.
"""

from eagle_jax.training.config import TrainConfig


def get_config() -> TrainConfig:
  return TrainConfig(
    target="smollm2-135m-instruct",
    data=(),
    heldout=(),
    out="runs/smollm2_eagle3",
    kind="eagle3",
    taps=(),
    draft_vocab_size=8192,
    init="last_layer",
    train_head=False,
    inputs="feature+token",
    switches=(),
    mlp_size=0,
    row_length=512,
    batch_size=1,
    epochs=2,
    max_chats=0,
    max_bad_rows=0,
    long_chats="split",
    pack_window=1100,
    features="cached",
    mesh=(1, 0, 1),
    accumulate=1,
    remat=False,
    loss_chunk=0,
    unroll_steps=3,
    anchor_rows=192,
    step_decay=0.8,
    feature_weight=1.0,
    vocabulary_weight=0.1,
    feature_noise=0.0,
    learning_rate=1e-3,
    schedule="cosine",
    warmup_steps=100,
    beta1=0.9,
    beta2=0.95,
    weight_decay=0.01,
    clip_norm=1.0,
    clip_value=0.0,
    log_every=10,
    eval_every=250,
    eval_rows=16,
    decode_every=0,
    decode_prompts=4,
    decode_tokens=64,
    save_every=100,
    keep_last=2,
    seed=0,
    dtype="float32",
  )
