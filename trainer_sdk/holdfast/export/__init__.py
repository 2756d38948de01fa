"""`holdfast checkpoints pull`: a checkpoint as files that stock tools open, so that no user is locked in.

pull -> contents (the saved units) -> tensors (fetched and verified) -> state_dicts (stock forms)
     -> torch_files | safetensors_files | dcp_folder -> publish (all of it or nothing)
"""
