"""`holdfast checkpoints pull`: a checkpoint as files that stock tools open, so that nothing is locked in.

pull -> contents (what was saved) -> tensors (fetched and verified) -> state_dicts (stock forms)
     -> torch_files | safetensors_files | dcp_folder -> publish (all of it or nothing)
"""
