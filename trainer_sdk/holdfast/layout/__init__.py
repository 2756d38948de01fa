"""Where each byte goes: pieces of tensors -> chunks of shards (plan), and back to any sharding (reshard). Pure."""
