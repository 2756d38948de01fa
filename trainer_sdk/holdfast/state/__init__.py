"""What a training job's state is: tensors to plan, a typed tree for the rest, and RNG. No collectives, no I/O."""
