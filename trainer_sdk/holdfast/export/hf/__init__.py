"""`holdfast checkpoints pull --format hf`: one model as the folder that from_pretrained() of transformers opens.

names (which tensors, called what) + model_files (config.json, tokenizer) -> fit (would transformers load it?)
     -> folder (all refusals, before a weight is fetched) -> weight_files (chunk by chunk, into files of a bounded size)
"""
