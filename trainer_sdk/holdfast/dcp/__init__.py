"""Plug-ins for people with their own torch.distributed.checkpoint calls: `ckpt.writer(step)` and `ckpt.reader()`.

    dcp.save(state_dict, storage_writer=ckpt.writer(step))
    dcp.load(state_dict, storage_reader=ckpt.reader())

DCP plans with its own collectives (they need a CPU backend, as gloo) and raises its own errors. The bytes, the index
and the commit are Holdfast's: raw tensor bytes in chunks, JSON, and no pickle that a reader would have to trust.
"""
