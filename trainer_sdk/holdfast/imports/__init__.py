"""`holdfast import`: checkpoints that other tools wrote, as checkpoints of a run. The inverse of `export/`.

sources (what SOURCE is) -> torch_file | safetensors_weights | dcp_source (its state, its tensors not yet read)
     -> checkpoint_plan (components, layout, documents) -> steps (each: upload, commit, read back, compare)
"""
