"""Mistral: a Llama with a sliding window in every layer, if the checkpoint sets one.

In GGUF files, the architecture of a Mistral is named "llama", so it is loaded as a Llama.
"""

from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_decoder
from pagoda.models.llama import Llama


def read(config: ConfigReader, architecture: str = "mistral") -> DecoderConfig:
    config.refuse("layer_types")
    window = config.integer("sliding_window") if config.has("sliding_window") else 0
    return read_decoder(config, architecture, windows=(window,) * config.num_layers())


MISTRAL = Architecture(name="mistral", hf_names=("MistralForCausalLM",), model=Llama, read=read)
