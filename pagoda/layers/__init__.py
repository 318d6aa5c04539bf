"""Layers: modules that own their parameters and compute with the ops that they are given. No torch.

module.py       Module, a node of a model's tree; its attributes are its children
parameter.py    what a layer declares of its weights: Matrix and its parts, Table, Vector, RotaryTable, BiasTable
attention.py    Attention: causal over the paged cache, or of a whole text; rotary.py, rope_config.py, distance_bias.py
latent_attention.py  LatentAttention: one latent vector per token in place of keys and values
linear.py       Linear, ExpertLinear, LMHead, Embedding; norm.py: RMSNorm, LayerNorm; mlp.py: GatedMLP, PlainMLP, MoE
Derived by walking a tree: kv.py (groups of layers that share a block table), sharding.py (a rank's rows and columns),
lora_targets.py (what adapters can adapt); adapted_ops.py: the ops of a forward in which rows have adapters
"""
