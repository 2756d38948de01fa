"""Checkpoints by URL: `holdfast://project/run@best:loss/model.safetensors`, a read-only filesystem for fsspec.

fsspec_filesystem (fsspec's interface) -> places (what a path names) -> checkpoint_files (one checkpoint, its lease)
    -> safetensors_layout (which bytes of a file lie where in which chunk) -> chunk_cache (verified chunks, bounded)

It needs no torch. fsspec is imported by fsspec_filesystem alone.
"""
