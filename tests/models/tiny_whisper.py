"""A tiny random Whisper made by transformers, and what transformers answers with it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin, WhisperConfig, WhisperForConditionalGeneration

from pagoda.core.request import MediaItem

VOCAB, NUM_MELS, POSITIONS, MAX_LEN, EOS = 131, 10, 37, 64, 2


def make_whisper(seed: int = 0, **changes: Any) -> WhisperForConditionalGeneration:
    """A model in float32 whose every parameter is random and matters."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "num_mel_bins": NUM_MELS,
        "d_model": 96,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 6,
        "encoder_ffn_dim": 80,
        "decoder_ffn_dim": 112,
        "max_source_positions": POSITIONS,
        "max_target_positions": MAX_LEN,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    }
    config = WhisperConfig(**{**shape, **changes})
    model = WhisperForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif parameter.dim() == 1:
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 1.5 * parameter[0].numel() ** -0.5)
    return model


def write_whisper(folder: Path, seed: int = 0, **changes: Any) -> WhisperForConditionalGeneration:
    """Write a checkpoint; return its model."""
    model = make_whisper(seed, **changes)
    model.save_pretrained(folder)
    return model


def sound(seed: int) -> MediaItem:
    """A window of noise."""
    features = np.random.default_rng(seed).normal(size=(NUM_MELS, 2 * POSITIONS)).astype(np.float32)
    return MediaItem(f"sound-{seed}", 0, POSITIONS, features)


def answer(model: WhisperForConditionalGeneration, item: MediaItem, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers answers greedily, whatever ends it."""
    return _generate(model, item, prompt, GenerationConfig(max_new_tokens=num_tokens, eos_token_id=None))[0]


def beams(
    model: WhisperForConditionalGeneration, item: MediaItem, prompt: list[int], num_tokens: int, width: int
) -> list[list[int]]:
    """What a beam search of transformers finds, best first."""
    search = GenerationConfig(
        max_new_tokens=num_tokens, num_beams=width, num_return_sequences=width, eos_token_id=EOS, pad_token_id=0
    )
    found = _generate(model, item, prompt, search)
    return [tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens for tokens in found]


def _generate(
    model: WhisperForConditionalGeneration, item: MediaItem, prompt: list[int], how: GenerationConfig
) -> list[list[int]]:
    """Without what Whisper's own `generate` adds."""
    assert item.features is not None
    how.decoder_start_token_id, how.do_sample = 1, False
    with torch.inference_mode():
        found = GenerationMixin.generate(  # type: ignore[attr-defined]
            model,
            torch.from_numpy(item.features)[None],
            generation_config=how,
            decoder_input_ids=torch.tensor([prompt]),
        )
    return found[:, len(prompt) :].tolist()
