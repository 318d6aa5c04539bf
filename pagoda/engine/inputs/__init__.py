"""Inputs: a prompt and its parameters become a core Request, or are refused with an error that names them.

the whole   input_processor.py: InputProcessor makes Requests from the parts below; input_limits.py: what they obey
prompts     prompts.py: their types; prompt_encoder.py: texts and token ids, bounded by size before they are tokenised;
            chat_prompts.py: conversations; image_prompts.py: their images; prompt_embeds.py: embeddings as prompts, or
            among the parts of messages
parameters  params_preparer.py: checked once for all prompts that share them
pooling     pooling_inputs.py: instructions, tasks and pairs of texts; scoring.py: the pairs of one call
adapters    adapters.py: LoRA and prompt adapters, checked, and identified by content
"""
