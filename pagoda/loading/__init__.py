"""Loading: from a model's name to its files, and from these to a tree whose parameters are filled.

resolve.py        a name to files: catalog.py (short names), known_names.py (those of other programs),
                  fetch_wheel.py, fetch_hub.py (with hub_download.py, and hub_cache.py), or a path; model_files.py
model_config.py   the settings and the empty tree, with sentence_transformers.py and token_ids.py; no torch
loader.py         fills the tree: reads each part, quantises it or keeps its codes, prepares it for the kernels
pieces.py         which rectangles of which stored tensors make up a matrix, or a rank's share of it (shares.py)
weights.py        reads regions of tensors: safetensors_header.py, gguf_file.py and gguf_blocks.py, packed_codes.py,
                  ctranslate2.py, mxfp4.py, from files in their own pages (mapped_file.py)
file_digest.py    the hash of a file's whole content, computed once for as long as the file stays as it is
packed_cache.py   the files of packed weights that later starts map (packed_file.py)
quantization.py   how weights are stored and held; weight_memory.py: what they will take, before anything is loaded;
                  outline.py: the files of a model of which only config.json is there
adapters/         LoRA and prompt adapters; tensor_file.py: a tensor that a client sends
generation_config.py, rotary_tables.py   defaults of sampling; what positions are turned by
"""
