"""The Holdfast service: catalogs checkpoints and brokers uploads; bytes never pass through it unless they must."""
