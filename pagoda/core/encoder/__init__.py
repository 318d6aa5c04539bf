"""Encoder inputs (images, audio): which outputs are cached, and what a chunk needs of the encoder."""

from pagoda.core.encoder.inputs import ChunkMedia, EncoderInputs

__all__ = ["ChunkMedia", "EncoderInputs"]
