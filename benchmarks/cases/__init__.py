"""One subject each: `run(spec)` measures it in this process and returns its figures, in bytes and seconds."""
