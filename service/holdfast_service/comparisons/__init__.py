"""How far apart the tensors of two checkpoints are: an operation that reads those that differ, and measures.

endpoints.py        the route that starts one
compare_values.py   the operation: opens both checkpoints, reads batch after batch, keeps what it has measured
batches.py          which bytes of which chunks are read together, within the memory that a comparison may take
read_batch.py       the chunks of a batch, verified, into arrays
sums.py             sums over two vectors -> norms, cosine and counts
measures.py         two arrays of one dtype -> their sums; the one module with numpy
"""
