"""Whisper: an encoder of log-mel spectrograms, and a decoder that attends to what it gives."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagoda.base.errors import RequestError
from pagoda.base.model_spec import ModelSpec
from pagoda.core.request import MediaItem
from pagoda.layers.kv import place_kv
from pagoda.layers.linear import Embedding, Linear, LMHead
from pagoda.layers.module import Module
from pagoda.layers.norm import LayerNorm
from pagoda.models.architecture import Architecture
from pagoda.models.base import FEATURES, Encoder, EncoderItem, ItemArray, Model
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import read_activation
from pagoda.models.encoder_decoder import NORM_EPS, StackLayer, read_stack
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.declare import Activation, Domain
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor

_PAD, _PAD_ROW, _WINDOWS = "pad", "pad_row", "windows"


@dataclass(frozen=True, slots=True)
class WhisperConfig:
    """spec: of the decoder.   encoder: of the encoder, whose max_position is the outputs of one window of sound.

    num_mels: bins of the spectrogram.   activation: of the feed-forward layers.
    """

    spec: ModelSpec
    encoder: ModelSpec
    num_mels: int
    activation: Activation


class WhisperLayer(StackLayer):
    """Each part after a norm; x is added to the residual stream by the norm that follows it."""

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        residual: Tensor | None,
        batch: ForwardBatch,
        kv: Sequence[KVLayer],
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden], not yet added to the residual stream -> the same for the tokens that continue."""
        x, residual = self.self_attn_layer_norm.add(ops, x, residual)
        x, residual = self.self_attn(ops, x, residual, batch, kv, last)
        if self.encoder_attn is not None and self.encoder_attn_layer_norm is not None:
            x, residual = self.encoder_attn_layer_norm.add(ops, x, residual)
            x = self.encoder_attn(ops, x, batch, kv, last)
        x, residual = self.final_layer_norm.add(ops, x, residual)
        return self.fc2(ops, ops.activate(self.fc1(ops, x), self.activation)), residual


class WhisperEncoder(Encoder):
    """Two convolutions over the frames of a window of sound, the second of which halves them, then layers."""

    def __init__(self, config: WhisperConfig) -> None:
        self.spec, self.num_mels = config.encoder, config.num_mels
        size = self.output_size = self.spec.hidden_size
        # The frames' neighbours are put next to them before they come, and those of the first layer's outputs by
        # `select_rows`.
        self.conv1 = Linear(3 * config.num_mels, size, bias=True, kernel=(config.num_mels, 3), quantizable=False)
        self.conv2 = Linear(3 * size, size, bias=True, kernel=(size, 3), taps=3, quantizable=False)
        self.embed_positions = Embedding(self.spec.max_position, size, is_divided=False)
        self.layers = [WhisperLayer(self.spec, config.activation, 0, k_bias=False) for _ in range(self.spec.num_layers)]
        self.layer_norm = LayerNorm(size, NORM_EPS)

    @property
    def shape(self) -> tuple[int, int]:
        """Of a window's features: mel bins, frames."""
        return self.num_mels, 2 * self.spec.max_position

    def largest_item(self) -> MediaItem:
        return MediaItem("", 0, self.spec.max_position, np.zeros(self.shape, np.float32))

    def num_outputs(self, shape: Sequence[int], grid: tuple[int, ...]) -> int:
        if tuple(shape) != self.shape or grid:
            raise RequestError(f"a window of sound has features of shape {self.shape}, not {tuple(shape)}", "media")
        return self.spec.max_position

    def item(self, features: np.ndarray, grid: tuple[int, ...]) -> EncoderItem:
        num_mels, num_frames = features.shape
        padded = np.zeros((num_mels, num_frames + 2), np.float32)
        padded[:, 1:-1] = features
        # [frames, mels, 3], after a row that becomes the zeros before the first frame.
        windows = np.lib.stride_tricks.sliding_window_view(padded, 3, axis=1).transpose(1, 0, 2)
        frames = np.zeros((1 + num_frames, 3 * num_mels), np.float32)
        frames[1:] = windows.reshape(num_frames, -1)
        num_tokens = num_frames // 2
        inputs = {
            FEATURES: ItemArray(frames, Domain.FEATURES),
            _PAD: ItemArray(np.zeros((1, self.spec.hidden_size), np.float32), Domain.EMBEDS),
            _PAD_ROW: ItemArray(np.zeros(1, np.int64), Domain.EMBEDS, indexes=Domain.FEATURES),
            _WINDOWS: ItemArray(2 * np.arange(num_tokens)[:, None] + np.arange(3), indexes=Domain.FEATURES),
        }
        return EncoderItem((np.array([num_tokens], np.int32),), num_tokens, inputs)

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        inputs = {name: given.tensor for name, given in batch.inputs.items()}
        x = ops.activate(self.conv1(ops, inputs[FEATURES]), Activation.GELU)
        ops.put_rows(x, inputs[_PAD], inputs[_PAD_ROW])
        x = ops.activate(self.conv2(ops, ops.select_rows(x, inputs[_WINDOWS])), Activation.GELU)
        x = ops.add(x, self.embed_positions(ops, batch.positions))
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(ops, x, residual, batch, kv, last=False)
        return self.layer_norm.add(ops, x, residual)[0]


class WhisperDecoder(Module):
    def __init__(self, config: WhisperConfig) -> None:
        spec = config.spec
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size)
        self.embed_positions = Embedding(spec.max_position, spec.hidden_size, is_divided=False)
        states_size = config.encoder.hidden_size
        self.layers = [WhisperLayer(spec, config.activation, states_size, k_bias=False) for _ in range(spec.num_layers)]
        self.layer_norm = LayerNorm(spec.hidden_size, NORM_EPS)

    def __call__(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        """[num_outputs, hidden], normed."""
        x = ops.add(self.embed_tokens.of_batch(ops, batch), self.embed_positions(ops, batch.positions))
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(ops, x, residual, batch, kv, last=layer is self.layers[-1])
        return self.layer_norm.add(ops, x, residual)[0]


class WhisperModel(Module):
    def __init__(self, config: WhisperConfig) -> None:
        self.encoder = WhisperEncoder(config)
        self.decoder = WhisperDecoder(config)


class Whisper(Model):
    """Both, and the decoder's head, which is its embedding."""

    def __init__(self, config: WhisperConfig) -> None:
        self.spec = config.spec
        self.model = WhisperModel(config)
        self.proj_out = LMHead(config.spec.hidden_size, config.spec.vocab_size, self.model.decoder.embed_tokens)
        self.kv_groups = place_kv(self)

    @property
    def media_encoder(self) -> Encoder:
        return self.model.encoder

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        return self.model.decoder(ops, batch, kv)

    def compute_logits(self, ops: ForwardOps, hidden: Tensor) -> Tensor:
        return self.proj_out(ops, hidden)


def read(config: ConfigReader) -> WhisperConfig:
    """Read the settings. Raises ConfigError for what is not supported."""
    config.refuse("scale_embedding")
    config.expect("tie_word_embeddings", True)
    config.refuse("median_filter_width", 7)  # as worker/alignment.py has it
    return WhisperConfig(
        spec=read_stack(config, "whisper", "decoder", config.integer("max_target_positions", 448)),
        encoder=read_stack(config, "whisper", "encoder", config.integer("max_source_positions", 1500)),
        num_mels=config.integer("num_mel_bins", 80),
        activation=read_activation(config, "activation_function", "gelu"),
    )


WHISPER = Architecture(
    name="whisper", title="Whisper", hf_names=("WhisperForConditionalGeneration",), model=Whisper, read=read
)
