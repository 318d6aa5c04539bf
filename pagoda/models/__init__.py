"""Models: one file per family, which shows a model as a tree of layers and reads its settings. No torch.

llama.py        the decoder that most others vary, by settings or (decoder_layers.py) by where their norms are
pooled_decoder.py   decoders without their head
siglip.py, idefics3.py, qwen2_5_vl.py   models that see: towers, and the decoders that read them
bert.py, modernbert.py   encoders, with a classification head or without
whisper.py, bart.py, t5.py   encoder-decoder models; what they share is in encoder_decoder.py
base.py         Model and Encoder: what the code that runs a forward sees, and how the items of an encoder are laid out
config_reader.py, decoder_config.py, encoder_config.py   settings, read with their types; what is unsupported is refused
image_config.py   how images become the input of a vision tower, per family
naming.py       from paths in the tree to the names of a checkpoint's tensors
architecture.py, registry.py   what connects a checkpoint's words to a model; the list of all
"""
